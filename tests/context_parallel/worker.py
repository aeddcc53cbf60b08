"""One process of the parity tests: runs every job of the list through the engine and writes what it saw."""

import contextlib
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.config.checks import check
from megatron_ext.context_parallel.choice import cp_options
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import build_optimizer, set_learning_rate, sync_params, unwrap, wrap
from megatron_ext.engine.step import Stepper
from megatron_ext.engine.weights import gather, initialise
from megatron_ext.evaluation.by_position import mean_loss
from megatron_ext.run.batches import BatchMaker
from tests.context_parallel import cases
from tests.context_parallel.cases import STEPS, VALIDATION, VOCABULARY, Case, Outcome, Parallel, Probe, ProbeOutcome

SEED = 5


class Collectives(TorchDispatchMode):
    """Lists every operation on a process group: whatever Python function it came through, it ends here."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.calls = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "c10d" in operation.namespace and self._concerned(args):
            self.calls.append((operation.__name__, self._bytes(operation, args)))
        return operation(*args, **(kwargs or {}))

    def _concerned(self, args: tuple[Any, ...]) -> bool:
        if any(isinstance(arg, str) and arg == self.group.group_name for arg in args):
            return True
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        groups = (dist.ProcessGroup.unbox(x) for x in boxed if x._type().qualified_name().endswith("c10d.ProcessGroup"))
        return any(group is self.group or group.group_name == self.group.group_name for group in groups)

    def _bytes(self, operation: Any, args: tuple[Any, ...]) -> int:
        if "alltoall_base" not in operation.__name__:
            return 1  # none other is expected
        sent, splits = args[1], args[4]
        to_others = sum(splits) - splits[self.group.rank()]
        return to_others * (sent.numel() // len(sent) if len(sent) else 0) * sent.element_size()

    def take(self) -> list[tuple[str, int]]:
        calls = self.calls
        self.calls = []
        return calls


class Worker:
    def __init__(self, sizes: Parallel) -> None:
        self.sizes = sizes
        config = Case(1).config(sizes)
        self.platform = platform.choose("cpu")
        self.ranks = parallel.start(config.parallel, config.model.num_layers, self.platform, SEED)
        self.collectives = Collectives(self.ranks.context_group)
        self.models: dict[Any, Any] = {}

    def model(self, case: Case) -> Any:
        """Wrapped chunks with their initial weights; built once for each kind of case."""
        entropy = case.weighting.weight_score == "mile"
        kind = (case.recompute, case.bf16, case.local_window, entropy)
        config = case.config(self.sizes)
        model = self.models.get(kind)
        if model is None or case.overlaps:
            model = wrap(build_chunks(config, VOCABULARY, self.platform), config)
        if not case.overlaps:
            self.models[kind] = model
        initialise(list(unwrap(model)), config.model, VOCABULARY, SEED, self.ranks)
        return model

    def train(self, case: Case) -> Outcome:
        config = case.config(self.sizes)
        group = parallel.context_group(config.parallel, self.ranks, self.platform)
        context = cp_options(config, group)
        model = self.model(case)
        optimizer = build_optimizer(model, config)
        maker = BatchMaker(config, self.ranks, context, case.short_losses)
        stepper = Stepper(model, optimizer, self.platform, self.ranks, config, group)
        set_learning_rate(optimizer, config.optimizer.lr, config.optimizer.weight_decay)
        results, counted = [], []
        for step in range(STEPS):
            batches = maker.train(case.row_at, step, step * case.rows, case.window)
            with self.collectives if step == 0 else contextlib.nullcontext():  # it slows the step down
                results.append(stepper.launch(batches).result())
            counted.append(group.take_sent_bytes())
        calls = self.collectives.take()
        with self.collectives:
            validation = maker.train(case.row_at, 0, VALIDATION, case.window)
            valid = mean_loss(stepper.evaluate(validation.train))
            assert valid is not None
        sync_params(model)
        chunks = list(unwrap(model))
        whole = gather(chunks, config.model, VOCABULARY, self.ranks)
        weight_bytes = [tensor.detach().float().numpy().tobytes() for chunk in chunks for tensor in chunk.parameters()]
        return Outcome(
            coordinates=(self.ranks.tensor, self.ranks.pipeline),
            **{name: [getattr(result, name) for result in results] for name in cases.SERIES},
            valid_loss=valid,
            digest=hashlib.sha256(b"".join(weight_bytes)).hexdigest(),
            weights=whole and {name: tensor.float().numpy() for name, tensor in whole.items()},
            calls=calls,
            evaluation_calls=self.collectives.take(),
            counted=counted,
            weight_metrics=[(r.weight_std, r.weight_max, r.terms.zero_count, r.terms.score_sum) for r in results],
        )

    def probe(self, probe: Probe) -> ProbeOutcome:
        case = probe.case
        config = probe.case.config(self.sizes)
        group = parallel.context_group(config.parallel, self.ranks, self.platform)
        context = cp_options(config, group)
        (model,) = self.model(case)

        @torch.no_grad()
        def losses(row_at: Callable[[int], TokenRow]) -> np.ndarray:
            first = BatchMaker(config, self.ranks, context).train(row_at, 0, 0, case.window).train[0]
            return model(first).cross_entropy_t.numpy()

        changed = [losses(_replaced(case, row, place)) for row, place in probe.places]
        ((_, share),) = case.plans(self.ranks.context_size, 0)[0]
        return ProbeOutcome(share.rows[self.ranks.context], np.stack([losses(case.row_at), *changed]))

    def do(self, job: Case | Probe) -> Any:
        """Return what came of a job; a text where its configuration or its plan is refused, on every process alike."""
        case = job.case if isinstance(job, Probe) else job
        try:
            check(case.config(self.sizes), self.ranks.world_size)
            case.plans(self.ranks.context_size, 0)
        except Exception as error:
            return repr(error)
        return self.probe(job) if isinstance(job, Probe) else self.train(job)


def _replaced(case: Case, row: int, place: int) -> Callable[[int], TokenRow]:
    def row_at(sample: int) -> TokenRow:
        original = case.row_at(sample)
        if sample != row:
            return original
        tokens = original.tokens.copy()
        tokens[place] = (tokens[place] + 20) % VOCABULARY
        return replace(original, tokens=tokens)

    return row_at


def work(sizes: Parallel, jobs: list[Case | Probe]) -> list[Any]:
    """Do each job in this process, together with the others, and return what it saw of each."""
    logging.basicConfig(level=logging.WARNING)
    worker = Worker(sizes)
    seen = [worker.do(job) for job in jobs]
    parallel.stop()
    return seen
