"""The stand-ins of Transformer Engine: the parameters of its layers, and what they keep."""

from __future__ import annotations

from typing import Any

import pytest
from pretending import TINY, pretending

from megatron_ext.config.arguments import parse
from megatron_ext.errors import UserError
from megatron_ext.run.rehearsal.ranks import check_layers, in_process
from megatron_ext.run.rehearsal.request import Request

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --qk-layernorm"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"


def rehearsed(flags: str, layers: str, processes: int) -> dict[str, Any]:
    """One step of rank 0."""
    found = in_process(Request([*TINY.split(), *flags.split()], processes, 0, [64], "drawn", layers=layers))
    assert found["fault"] is None, found["fault"]["traceback"]
    assert found["layers"].startswith("Transformer Engine's layers stand in") == (layers != "local")
    (step,) = found["steps"]
    assert step["fault"] is None, step["fault"]["traceback"]
    return dict(step)


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (f"{EXPERTS} --expert-model-parallel-size 2", "--moe-grouped-gemm"),
        pytest.param("--tensor-model-parallel-size 2 --add-qkv-bias", "", marks=pytest.mark.slow),
        pytest.param("--block phi --num-query-groups 4", "", marks=pytest.mark.slow),
        pytest.param("--block gemma3", "", marks=pytest.mark.slow),
    ],
)
def test_they_have_the_parameters_that_files_have(flags: str, more: str) -> None:
    """By the names of files, of the shapes and types of Megatron's local layers, under Transformer Engine's names."""
    local = pretending("table", *flags.split())
    theirs = pretending("table", "transformer_engine", *flags.split(), *more.split())

    def by_file(rows: Any) -> Any:
        return sorted([files, shape, dtype] for files, _, shape, dtype in rows)

    assert by_file(theirs) == by_file(local)
    names = {name for _, name, _, _ in theirs}
    if more:
        assert "decoder.layers.1.mlp.experts.linear_fc2.weight1" in names
    if "--block" not in flags:
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names


@pytest.mark.parametrize(
    ("flags", "processes"),
    [(TENSOR, 2),
     pytest.param("", 1, marks=pytest.mark.slow),
     pytest.param(f"{EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2", 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_step_of_theirs_does_the_products_of_a_local_one(flags: str, processes: int) -> None:
    """As many FLOPs and bytes over each group: products are the same, whatever is fused; and no gradient stays."""
    theirs = rehearsed(flags, "transformer_engine", processes)
    local = rehearsed(flags.replace("--moe-grouped-gemm", ""), "local", processes)
    assert sum(theirs["flops"].values()) == sum(local["flops"].values())
    for group in set(local["collectives"]) - {"alone"}:
        assert theirs["collectives"][group]["sent_bytes"] == local["collectives"][group]["sent_bytes"], group
    for part in ("weights", "gradients", "optimizer"):
        assert theirs["memory"][part] == local["memory"][part]
    assert theirs["circles"] == 0


@pytest.mark.parametrize(
    ("flags", "layers", "said"),
    [
        (
            "--num-experts 4 --moe-grouped-gemm",
            "local",
            "moe_grouped_gemm: got true with Megatron's local layers",
        ),
        ("--fp8-format hybrid", "transformer_engine", "fp8_format: got hybrid with --layers transformer_engine"),
    ],
)
def test_layers_that_cannot_serve_are_refused(flags: str, layers: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_layers(layers, parse([*TINY.split(), *flags.split()]))
    check_layers(layers, parse(TINY.split()))
