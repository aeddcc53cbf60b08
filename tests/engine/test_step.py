"""An optimizer step in one process: division by the denominator, norms, skipped steps, divergence, validation."""

import copy
import math
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.batch import PackedBatch, RowScores, StepBatches, assemble, lay_end_to_end, pack
from megatron_ext.config import Config, WeightingConfig
from megatron_ext.config.arguments import parse
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import build_chunks
from megatron_ext.engine.optimizer import (
    build_optimizer,
    clip_and_update,
    set_learning_rate,
    squared_gradient_norm,
    unwrap,
    wrap,
)
from megatron_ext.engine.step import Outcome, Pipeline, Stepper, StepResult
from megatron_ext.engine.weights import initialise
from megatron_ext.evaluation.by_position import mean_loss
from megatron_ext.loss import TokenLosses
from megatron_ext.token_weighting.weigher import Weigher
from tests.one_process import one_process

LENGTH = 16
VOCABULARY = 50


class OneProcess:
    """A model, its optimizer and its stepper, alone in their groups."""

    def __init__(self) -> None:
        sizes = f"--num-layers 2 --vocab-size {VOCABULARY} --seq-length {LENGTH}"
        self.config = parse(f"{sizes} --weight-decay 0.5".split())
        self.platform = platform.choose("cpu")
        self.ranks = parallel.start(self.config.parallel, 2, self.platform, seed=1)
        self.model = wrap(build_chunks(self.config, VOCABULARY, self.platform), self.config)
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the first weights and without moments."""
        initialise(list(unwrap(self.model)), self.config.model, VOCABULARY, 1, self.ranks)
        optimizer = build_optimizer(self.model, self.config)
        set_learning_rate(optimizer, 1e-2, 0.5)
        group = parallel.context_group(self.config.parallel, self.ranks, self.platform)
        self.stepper = Stepper(self.model, optimizer, self.platform, self.ranks, self.config, group)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for chunk in self.model for p in chunk.parameters()])


@pytest.fixture(scope="module")
def built() -> Iterator[OneProcess]:
    with one_process():
        yield OneProcess()


@pytest.fixture
def process(built: OneProcess) -> OneProcess:
    built.reset()
    return built


def row(seed: int, trained: int = LENGTH) -> TokenRow:
    """A row of one document whose first `trained` labels count."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, LENGTH + 1)
    return TokenRow(tokens, np.array([LENGTH]), np.arange(LENGTH) < trained)


def batch(*rows: TokenRow, **changes: Any) -> PackedBatch:
    return replace(pack(list(rows), LENGTH, Config().mask_options()), **changes)


def test_micro_batches_joined_or_split_are_one_step(process: OneProcess) -> None:
    """The division is by all trained tokens: a mean of the micro-batches' means would differ."""
    rows = [row(0), row(1, trained=3)]
    joined = process.stepper.launch(StepBatches([batch(*rows)])).result()
    after = process.weights()
    process.reset()
    split = process.stepper.launch(StepBatches([batch(token_row) for token_row in rows])).result()
    assert joined.denominator == split.denominator == LENGTH + 3
    assert split.lm_loss == pytest.approx(joined.lm_loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(joined.grad_norm, rel=1e-4)
    torch.testing.assert_close(process.weights(), after, rtol=0, atol=1e-4)


def test_attention_is_measured_as_the_backend_gets_it(process: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries of the first of two micro-batches, compared with the tensors that the backend gets."""
    recorded_inputs: list[tuple[torch.Tensor, ...]] = []
    for layer in next(unwrap(process.model)).decoder.layers:
        attention = layer.self_attention.core_attention

        def recorded(inputs: QKV, *call_arguments: Any, attend: Any = attention.backend) -> Any:
            recorded_inputs.append((inputs.query_tNH.detach().double(), inputs.key_uGH.detach().double()))
            return attend(inputs, *call_arguments)

        monkeypatch.setattr(attention, "backend", recorded)
    rows = [row(0), row(1)]
    options = Config().mask_options()
    masks = options.at(LENGTH, [row(0).document_ends], LENGTH)
    sampled = assemble(lay_end_to_end([rows[0]]), masks, None, sampled=np.arange(LENGTH))
    result = process.stepper.launch(StepBatches([sampled, batch(rows[1])], attention_measured=True)).result()
    health = result.attention
    assert health is not None
    for layer, (query, key) in enumerate(recorded_inputs[:2]):
        groups = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = query.shape[-1] ** -0.5 * torch.einsum("iNH,jNH->Nij", query, groups)
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean()
        assert health.entropy[layer] == pytest.approx(entropy.item(), rel=1e-5)
        assert health.s_max_scaled[layer] == pytest.approx(scores.max().item(), rel=1e-5)


def test_a_refused_step_and_one_without_a_trained_token_change_nothing(process: OneProcess) -> None:
    """Weight decay and earlier moments would change weights. Values of a refused step are still reported."""
    process.stepper.launch(StepBatches([batch(row(0))])).result()
    norms: list[float] = []

    def refuse(result: StepResult) -> bool:
        norms.append(result.grad_norm)
        return False

    before = process.weights()
    state = copy.deepcopy(process.stepper.optimizer.state_dict())
    launched = process.stepper.launch(StepBatches([batch(row(1))]), refuse)
    result = launched.result()
    assert result.outcome is Outcome.REFUSED
    assert norms == [result.grad_norm]
    assert result.lm_loss > 0
    skipped = process.stepper.launch(StepBatches([batch(row(1, trained=0))])).result()
    assert skipped.outcome is Outcome.NO_TOKENS
    assert (skipped.grad_norm, skipped.train_loss, skipped.lm_loss) == (0.0, 0.0, 0.0)
    assert torch.equal(process.weights(), before)
    torch.testing.assert_close(process.stepper.optimizer.state_dict(), state, rtol=0, atol=0)
    process.stepper.launch(StepBatches([batch(row(2))])).result()
    after = process.weights()
    process.reset()
    for seed in (0, 2):
        process.stepper.launch(StepBatches([batch(row(seed))]), lambda result: result.grad_norm > 0)
    assert torch.equal(process.weights(), after)


def test_a_weighted_loss_may_diverge_alone(process: OneProcess) -> None:
    """Although the loss is finite; one that is not ends tests/faults/test_divergence.py's runs."""
    result = process.stepper.launch(StepBatches([batch(row(0), weights_t=torch.full((LENGTH,), torch.inf))])).result()
    assert "the weighted loss is inf" in str(result.divergence())


def test_validation_does_not_change_training(process: OneProcess) -> None:
    """It computes the loss of the same tokens, changes no weight, and the next step is the same."""
    first = process.stepper.launch(StepBatches([batch(row(0))])).result()
    process.reset()
    before = process.weights()
    losses = process.stepper.evaluate([batch(row(0))])
    assert mean_loss(losses) == pytest.approx(first.lm_loss, rel=1e-6)
    assert torch.equal(process.weights(), before)
    again = process.stepper.launch(StepBatches([batch(row(0))])).result()
    assert replace(again, score_seconds=first.score_seconds) == first


def test_a_forward_pass_has_no_dropout_or_gradients_and_training_has_both(process: OneProcess) -> None:
    config = replace(process.config, model=replace(process.config.model, hidden_dropout=0.5))
    (chunk,) = build_chunks(config, VOCABULARY, process.platform)
    initialise([chunk], config.model, VOCABULARY, 1, process.ranks)
    modes = []

    def value_of(_: PackedBatch, losses: TokenLosses) -> torch.Tensor:
        modes.append((chunk.training, torch.is_grad_enabled()))
        return losses.cross_entropy_t

    pipeline = Pipeline([chunk])
    first, again = pipeline.forward_only([batch(row(0))] * 2, value_of)
    assert modes == [(False, False)] * 2
    torch.testing.assert_close(first, again, rtol=0, atol=0)  # in training, dropout would differ
    assert chunk.training
    assert all(parameter.grad is None for parameter in chunk.parameters())

    modes.clear()
    first, again = pipeline.run(
        [batch(row(0))] * 2, lambda micro_batch, losses: (losses.cross_entropy_t.sum(), value_of(micro_batch, losses))
    )
    assert modes == [(True, True)] * 2
    assert not torch.equal(first, again)
    assert any(parameter.grad is not None for parameter in chunk.parameters())


READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique")


class HostReads(TorchDispatchMode):
    """Lists where the host reads a tensor's values: on CUDA it would wait there for all earlier work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        for name in ("tolist", "numpy"):  # on a CPU they read the memory without a dispatched operation
            original = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, self._noting(name, original))

    def _noting(self, name: str, original: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return original(tensor, *args, **kwargs)

        return read

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masks = any(index is not None and index.dtype == torch.bool for index in indices)
        if name in READS or masks:
            self._note(name)
        return operation(*args, **(kwargs or {}))

    def _note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "test_step.py" not in frame.filename]
        megatron_frames = [frame for frame in frames if "megatron" in frame.filename.rpartition("site-packages")[2]]
        self.found.append(f"{Path(megatron_frames[-1].filename).name}: {name}" if megatron_frames else name)


def test_a_step_does_not_synchronize_with_the_device(process: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our code nor Megatron's reads values; the result is read once, later."""
    step = StepBatches([batch(row(0)), batch(row(1, trained=3))])
    on_device = StepBatches([micro_batch.to(process.platform.device) for micro_batch in step.train])
    reads = HostReads(monkeypatch)
    with reads:
        launched = process.stepper.launch(on_device)
    assert reads.found == []
    with reads:
        result = launched.result()
    assert reads.found == ["device.py: tolist"]
    process.reset()
    assert replace(process.stepper.launch(step).result(), score_seconds=result.score_seconds) == result


@pytest.mark.parametrize("weighting", [("abs", "dense"), ("ppmi", "sparse"), ("longce", "none")])
def test_weights_by_losses_do_not_synchronize(process: OneProcess, monkeypatch: pytest.MonkeyPatch, weighting) -> None:
    options = WeightingConfig("frozen", weight_score=weighting[0], weight_post=weighting[1], short_context=8)
    process.stepper.weighting = options
    process.stepper.weigher = Weigher(options, LENGTH, process.stepper.weigher.context)
    tokens = lay_end_to_end([row(0), row(1, trained=3)])
    masks = Config().mask_options().at(LENGTH, [np.array([LENGTH])] * 2, LENGTH)
    trained, labels = torch.from_numpy(tokens.trained), torch.from_numpy(tokens.labels)
    scores = RowScores(trained, labels, (0, 1), (5, 6), short_loss_T=torch.linspace(2, 6, 2 * LENGTH))
    reads = HostReads(monkeypatch)
    with reads:
        launched = process.stepper.launch(StepBatches([assemble(tokens, masks, None, scores)]))
    assert reads.found == []
    assert launched.result().weight_std > 0


def test_megatrons_own_step_reads_the_norm(process: OneProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, `squared_gradient_norm` and `clip_and_update` are no longer needed."""
    process.stepper.launch(StepBatches([batch(row(0))]))
    reads = HostReads(monkeypatch)
    with reads:
        process.stepper.optimizer.step()
    assert "clip_grads.py: _local_scalar_dense" in reads.found


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_the_update_equals_megatrons(process: OneProcess, clip: float) -> None:
    """Bit for bit where nothing is clipped; but the norm stays on the device, and is Megatron's to float32."""
    seen = []
    for by_this_package in (True, False):
        process.reset()
        optimizer = process.stepper.optimizer
        for part in (optimizer, *optimizer.chained_optimizers):
            part.config.clip_grad = clip or math.inf
        for seed in range(3):
            for chunk in process.model:
                chunk.zero_grad_buffer()
                chance = torch.Generator().manual_seed(seed)
                for parameter in chunk.parameters():
                    parameter.main_grad.copy_(torch.randn(parameter.shape, generator=chance))
            if by_this_package:
                squared = squared_gradient_norm(optimizer, process.platform.device)
                clip_and_update(optimizer, squared)
                norm = squared.item() ** 0.5
            else:
                norm = optimizer.step()[1]
        seen.append((norm, process.weights()))
    (norm, weights), (their_norm, their_weights) = seen
    assert norm == pytest.approx(their_norm, rel=1e-6)
    assert norm > 0.05
    if clip == 0.05:
        torch.testing.assert_close(weights, their_weights, rtol=1e-6, atol=1e-8)
    else:
        assert torch.equal(weights, their_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_ten_million_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares added sequentially in float32 would make it 4e-4 too small."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    generator = torch.Generator().manual_seed(0)
    gradients = [(1e-3 * torch.randn(size, generator=generator)).to(dtype) for size in (10_000_000, 7)]
    optimizer: Any = SimpleNamespace(
        prepare_grads=lambda: False,
        get_grad_stats_parallel_group=lambda: None,
        get_main_grads_for_grad_norm=lambda: gradients,
    )
    squared = squared_gradient_norm(optimizer, torch.device("cpu"))
    exact = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert squared.dtype == torch.float32
    assert squared.item() == pytest.approx(exact, rel=1e-6)
