"""A precision-aware optimizer's state is saved as everyone's, float32, and comes back in its own types."""

from collections.abc import Iterator
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.distrib_optimizer as megatron_distributed
import megatron.core.utils as megatron_utils
import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import Tensor

from megatron_ext.batch import pack
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import compat, model, parallel, platform, transformer
from megatron_ext.engine.optimizer import (
    build_optimizer,
    clip_and_update,
    set_learning_rate,
    squared_gradient_norm,
    unwrap,
    wrap,
)
from megatron_ext.engine.optimizer_state import OptimizerState, optimizer_states
from megatron_ext.engine.weights import initialise, saved_weights
from megatron_ext.masks import MaskOptions
from tests.engine.fake_modules import fake
from tests.one_process import one_process

VOCABULARY = 50


class LoweredAdam(torch.optim.Optimizer):
    """It has the names of Transformer Engine's FusedAdam: lower types, fp16 moments scaled by their largest value."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, adam_w_mode: bool,
        exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype, store_param_remainders: bool,
        master_weights: bool = False, use_decoupled_grad: bool = False,
        master_weight_dtype: torch.dtype = torch.float32, capturable: bool = False,
    ) -> None:  # fmt: skip
        assert not store_param_remainders
        assert not capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.types = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self.scales: dict[Any, dict[str, float]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        """Make moments of 0 and the master weight."""
        assert not store_param_remainders
        for name in ("exp_avg", "exp_avg_sq"):
            self.set_scaled_state(param, name, torch.zeros(param.shape))
        if self.master_weights:
            self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def set_scaled_state(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        """Take a float32 state over in its type."""
        assert unscaled.dtype == torch.float32
        scale = (unscaled.abs().max() / 1024).item() or 1.0
        scale = scale if self.types[name] == torch.float16 else 1.0
        self.scales.setdefault(param, {})[name] = scale
        self.state[param][name] = (unscaled / scale).to(self.types[name])

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        """Return a state in float32."""
        stored = self.state[param][name]
        return stored if stored.dtype == torch.float32 else stored.float() * self.scales[param][name]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do AdamW in float32 and keep the results in their types."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param not in self.state:
                    self.initialize_state(param, store_param_remainders=False)
                gradient = (param.decoupled_grad if self.use_decoupled_grad else param.grad).float()
                first = self.get_unscaled_state(param, "exp_avg").lerp(gradient, 1 - beta1)
                second = self.get_unscaled_state(param, "exp_avg_sq") * beta2 + gradient.square() * (1 - beta2)
                master = self.get_unscaled_state(param, "master_param") if self.master_weights else param
                master = master * (1 - group["lr"] * group["weight_decay"])
                corrected = (second / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                master = master - group["lr"] / (1 - beta1 ** group["step"]) * first / corrected
                self.set_scaled_state(param, "exp_avg", first)
                self.set_scaled_state(param, "exp_avg_sq", second)
                if self.master_weights:
                    self.set_scaled_state(param, "master_param", master)
                param.copy_(master)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its Adam alone, where Megatron and our checks look for it."""
    fake(monkeypatch, "transformer_engine.pytorch.optimizers", FusedAdam=LoweredAdam)
    monkeypatch.setattr(compat, "install_optimizer", lambda: None)
    monkeypatch.setattr(megatron_utils, "_te_version", Version("2.11.0"))
    monkeypatch.setattr(megatron_optimizer, "Adam", LoweredAdam)
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(megatron_distributed, "Adam", LoweredAdam)
    monkeypatch.setattr(transformer, "broken", lambda *unused, **facts: ())
    with one_process():
        yield


def built(config: Config, ranks: parallel.Ranks, where: platform.Platform) -> tuple[Any, Any]:
    """A model and its optimizer, with the first weights."""
    chunks = model.build_chunks(config, VOCABULARY, where)
    initialise(chunks, config.model, VOCABULARY, 1, ranks)
    wrapped = wrap(chunks, config)
    return wrapped, build_optimizer(wrapped, config)


def one_step(wrapped: Any, optimizer: Any, seed: int) -> None:
    """Update with random gradients, and another learning rate each step."""
    set_learning_rate(optimizer, 1e-2 / seed, 0.1)
    generator = torch.Generator().manual_seed(seed)
    for parameter in wrapped[0].parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def states(optimizer: Any, wrapped: Any) -> list[Tensor]:
    """The master weight and the moments of each weight, as float32."""
    (distributed,) = optimizer.chained_optimizers
    of_weights = [optimizer_states(distributed, parameter) for parameter in wrapped[0].parameters()]
    return [state[name].clone() for state in of_weights for name in ("param", "exp_avg", "exp_avg_sq")]


TYPES = {
    "as everyone's": "",
    "bf16 moments": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "fp16 all": "--exp-avg-dtype fp16 --exp-avg-sq-dtype fp16 --main-params-dtype fp16",
    "bf16 gradients": "--main-grads-dtype bf16",
}


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("precision", ["--bf16", "--bf16 --fp8-format hybrid"])
@pytest.mark.parametrize("types", TYPES)
def test_a_lowered_state_goes_on(types: str, precision: str) -> None:
    """With fp8's tensorwise recipe master weights are Megatron's, otherwise the optimizer's own."""
    flags = f"--num-layers 2 --vocab-size {VOCABULARY} --seq-length 16 --use-precision-aware-optimizer"
    config = parse(f"{flags} {precision} {TYPES[types]}".split())
    where = platform.choose("cpu")
    ranks = parallel.start(config.parallel, 2, where, seed=1)
    wrapped, optimizer = built(config, ranks, where)
    assert wrapped[0].buffers[0].grad_dtype == (torch.bfloat16 if types == "bf16 gradients" else torch.float32)
    for seed in (1, 2):
        one_step(wrapped, optimizer, seed)
    saved = OptimizerState(optimizer, bf16=True)
    (chunk,) = unwrap(wrapped)
    runs = {(run.name, run.offset): run for run in saved.shards(list(saved_weights([chunk], config.model, ranks)))}
    counters = saved.counters()
    assert counters == {"step": 2}
    assert {run.dtype for run in runs.values()} == {torch.float32}
    assert {run.name.split(".")[2] for run in runs.values()} == {"exp_avg", "exp_avg_sq", "fp32_param"}

    fresh, resumed = built(config, ranks, where)
    state = OptimizerState(resumed, bf16=True)
    (fresh_model,) = unwrap(fresh)
    fresh_runs = state.shards(list(saved_weights([fresh_model], config.model, ranks)), to_load=True)
    assert not any(run.data().any() for run in fresh_runs if "exp_avg" in run.name)
    for run in fresh_runs:  # what reading does: in place
        run.data().copy_(runs[run.name, run.offset].data())
    state.load(counters)
    for resumed_value, kept_value in zip(fresh[0].parameters(), wrapped[0].parameters(), strict=True):
        resumed_value.data.copy_(kept_value)
    for resumed_value, kept_value in zip(states(resumed, fresh), states(optimizer, wrapped), strict=True):
        torch.testing.assert_close(resumed_value, kept_value, rtol=2e-3, atol=1e-9)  # fp16 is scaled anew
    one_step(wrapped, optimizer, 3)
    one_step(fresh, resumed, 3)
    assert OptimizerState(resumed, bf16=True).counters() == {"step": 3}
    for resumed_value, kept_value in zip(states(resumed, fresh), states(optimizer, wrapped), strict=True):
        torch.testing.assert_close(resumed_value, kept_value, rtol=5e-3, atol=1e-6)


def gathered(block_tokens: int, main_grads: str) -> tuple[list[Tensor], float]:
    """The gradients of one row, each as it lies in its buffer, and their norm as the update measures it."""
    flags = f"--num-layers 1 --vocab-size {VOCABULARY} --seq-length {ROW} --bf16 --loss-block-tokens {block_tokens}"
    config = parse(f"{flags} --use-precision-aware-optimizer --main-grads-dtype {main_grads}".split())
    where = platform.choose("cpu")
    wrapped, optimizer = built(config, parallel.start(config.parallel, 1, where, seed=1), where)
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, ROW + 1)
    batch = pack([TokenRow(tokens, np.array([], dtype=np.int64), np.ones(ROW, dtype=np.bool_))], ROW, MaskOptions(True))
    wrapped[0](batch.to(where.device)).cross_entropy_t.sum().backward()
    wrapped[0].finish_grad_sync()
    gradients = [parameter.main_grad.clone() for parameter in wrapped[0].parameters()]
    squared = squared_gradient_norm(optimizer, where.device)
    clip_and_update(optimizer, squared)
    parallel.finish_stage()
    return gradients, squared.item() ** 0.5


ROW = 512


@pytest.mark.usefixtures("transformer_engine")
def test_gradients_gathered_in_bf16_are_rounded_once() -> None:
    """They and their norm are not rounded after each block of the loss."""
    wanted, norm = gathered(ROW, "fp32")
    for block_tokens in (ROW, 4):
        gradients, its_norm = gathered(block_tokens, "bf16")
        assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
        for gradient, exact in zip(gradients, wanted, strict=True):
            error = (gradient.double() - exact.double()).norm() / exact.double().norm()
            assert error < 2**-8, block_tokens
        assert its_norm == pytest.approx(sum(g.double().square().sum().item() for g in gradients) ** 0.5, rel=1e-5)
        assert its_norm == pytest.approx(norm, rel=1e-3)
