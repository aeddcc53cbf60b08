"""What is refused is what Transformer Engine would refuse, or compute wrongly, on the same machine.

The functions that take a rank run on the emulated machine.
"""

import os
import re
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch

from megatron_ext.attention import adapters
from megatron_ext.attention.backends import PerCall, select
from megatron_ext.attention.limits import Heads
from megatron_ext.config import TrainingConfig
from megatron_ext.context_parallel.exchange import QKV
from megatron_ext.errors import UserError
from tests.attention.kernels import call_of, inputs_of
from tests.launcher import call
from tests.transformer_engine import SERVER
from tests.transformer_engine.cuda import MACHINE
from tests.transformer_engine.extension import calls


@dataclass(frozen=True)
class Machine:
    """A GPU, its software and how it is used."""

    capability: tuple[int, int] = (9, 0)
    cudnn: int = 92600
    variables: dict[str, str] = field(default_factory=dict)

    def become(self) -> None:
        MACHINE.capability, MACHINE.cudnn = self.capability, self.cudnn
        os.environ.update(self.variables)


H100 = Machine()
A100 = Machine(capability=(8, 0))
WITHOUT_CUDNN = Machine(variables={"NVTE_FUSED_ATTN": "0"})
WITHOUT_FLASH = Machine(variables={"NVTE_FLASH_ATTN": "0"})
MACHINES = {
    "H100": H100,
    "A100": A100,
    "without cuDNN": WITHOUT_CUDNN,
    "an old cuDNN": replace(H100, cudnn=90500),
    "an old cuDNN without flash-attn": replace(WITHOUT_FLASH, cudnn=90500),
}


CHOICES = (64, 256), (False, True), (4, 2), (None, 6), (False, True)


def named_and_run(rank: int, machine: Machine) -> dict[str, tuple[str, str]]:
    """Return for heads, windows and modes the kernel that Transformer Engine names, and the one that it runs."""
    machine.become()
    kernels = {}
    for size, sinks, groups, window, deterministic in product(*CHOICES):
        torch.use_deterministic_algorithms(deterministic)
        segments = call_of([(5, 9), (17, 17), (1, 4)], window)
        inputs = [x.bfloat16() for x in inputs_of(segments, 4, groups, size)]
        sink = torch.zeros(4, dtype=torch.bfloat16) if sinks else None
        named = adapters.te_thd_kernel(4, groups, size, sinks, segments)[0]
        before = calls["fused_attn_fwd"]
        try:
            adapters.te_thd(QKV(*inputs[:3], sink), segments, 0.3)
            ran = "cudnn" if calls["fused_attn_fwd"] > before else "flash"
        except ValueError:
            ran = "none"
        name = "none" if named is None else "flash" if named.startswith("2.") else named
        case = f"heads of {size}, {groups} of keys, sinks {sinks}, window {window}, deterministic {deterministic}"
        kernels[case] = name, ran
    return kernels


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernel_that_it_names_is_the_one_that_it_runs(machine: str) -> None:
    (kernels,) = call(named_and_run, 1, MACHINES[machine], server=SERVER)
    assert {case: named for case, (named, _) in kernels.items()} == {case: ran for case, (_, ran) in kernels.items()}


def chosen(rank: int, machine: Machine, heads: Heads, segments: list[int]) -> str:
    """The backend that takes a call, or the message that refuses it."""
    machine.become()
    lengths = call_of([(length, length) for length in segments])
    try:
        return PerCall(("te_thd",)).choose(lengths, heads)
    except UserError as error:
        return str(error)


MANY = [1] * 70_000
HEADS = Heads(64, 64)
SINKS = "(gives wrong gradients|has no kernel)"  # versions before 2.12 have none


@pytest.mark.parametrize(
    ("machine", "heads", "segments", "reason"),
    [
        (H100, HEADS, MANY, "te_thd"),
        (A100, HEADS, MANY, "te_thd takes at most 65,535 segments"),
        (WITHOUT_CUDNN, HEADS, MANY, "te_thd takes at most 65,535 segments"),
        (A100, HEADS, [8], "te_thd"),
        (replace(WITHOUT_FLASH, cudnn=90500), HEADS, [8], "te_thd has no kernel for heads of 64"),
        (replace(H100, cudnn=91700), HEADS, [8], "te_thd may give NaN gradients"),
        (replace(H100, cudnn=91800), HEADS, [8], "te_thd"),
        (replace(H100, cudnn=92500), Heads(96, 96, sinks=True), [8], f"te_thd {SINKS} for heads of 96 with sinks"),
        (
            replace(H100, cudnn=92500),
            Heads(96, 80, sinks=True),
            [8],
            f"te_thd {SINKS} for heads of .96, 80. with sinks",
        ),
        (A100, Heads(96, 96, sinks=True), [8], "te_thd has no kernel for heads of 96 with sinks"),
    ],
)
def test_calls_that_would_fail_or_be_wrong_are_refused(machine, heads, segments, reason) -> None:
    (answer,) = call(chosen, 1, machine, heads, segments, server=SERVER)
    assert re.search(rf"^{reason}$" if reason == "te_thd" else reason, answer), answer


def started(rank: int, machine: Machine) -> str:
    machine.become()
    try:
        select("te_thd", torch.device("cuda"), torch.bfloat16, 64)
    except UserError as error:
        return str(error)
    return "started"


def test_a_run_without_a_kernel_is_refused_at_its_start() -> None:
    machine = replace(WITHOUT_FLASH, capability=(8, 0))
    (message,) = call(started, 1, machine, server=SERVER)
    assert "which cannot serve: te_thd has no kernel for heads of 64 on sm_80 with cuDNN 9.26.0" in message


RECIPES = ("blockwise", "mxfp8")


def gathered_in_fp8(rank: int) -> list[list[bool]]:
    """Return by recipe whether Transformer Engine would gather the tensor of a rank, with our least rows and half."""
    H100.become()
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    e4m3 = tex.DType.kFloat8E4M3
    quantizers = (Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True), MXFP8Quantizer(e4m3))
    answers = []
    for recipe, quantizer in zip(RECIPES, quantizers, strict=True):
        multiple = TrainingConfig(fp8_format="hybrid", fp8_recipe=recipe).fp8_gathered_multiple
        answers.append([quantizer.is_quantizable(torch.empty(rows, multiple)) for rows in (multiple, multiple // 2)])
    return answers


def test_the_rows_that_sequence_parallel_ranks_gather_in_fp8_are_whole_blocks() -> None:
    """Its releases 2.9 to 2.11 end with an assertion where they are not."""
    assert call(gathered_in_fp8, 1, group=False, server=SERVER) == [[[True, False]] * len(RECIPES)]
