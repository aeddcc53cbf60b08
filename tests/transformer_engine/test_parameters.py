"""What gradient norms and optimizers read of Transformer Engine's parameters is true, whichever version sets it."""

import pytest

from tests.conftest import SmallData
from tests.launcher import call
from tests.parity import test_layouts as layouts
from tests.runs import CONFIG
from tests.transformer_engine import SERVER

MODELS = {
    "norms of queries and keys": layouts.QWEN3,
    "latent": layouts.LATENT,
    "olmo3": layouts.OLMO3,
    "mixtral": layouts.MIXTRAL,
    "dots1 grouped": f"{layouts.DOTS1} --moe-grouped-gemm",
}


def parameters(rank: int, flags: list[str]) -> dict[str, tuple[list[int], int | None]]:
    """Return the shape of each parameter that the trainer builds, and along which dimension it says that it is cut."""
    from megatron_ext.config.arguments import parse
    from megatron_ext.run.build import build

    (chunk,) = build(parse(flags)).chunks
    return {
        name: (
            list(parameter.shape),
            parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
        )
        for name, parameter in chunk.named_parameters()
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_says_along_which_dimension_it_is_cut(name: str, small_data: SmallData) -> None:
    flags = [*CONFIG, *small_data.flags, "--seq-length", "64", *MODELS[name].split()]
    flags += ["--device", "cuda", "--attention-backend", "reference"]
    (whole,) = call(parameters, 1, flags, server=SERVER)
    part, _ = call(parameters, 2, [*flags, *layouts.TP2_SP.split()], server=SERVER)
    for parameter, (shape, _) in whole.items():
        cut = [axis for axis, size in enumerate(shape) if part[parameter][0][axis] != size]
        assert part[parameter][1] == (cut[0] if cut else None), parameter
