"""Who shares gradients and optimizer state: as given, or by the platform and the number of ranks."""

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.options import GradientSharing

NOTHING, EVERYTHING = GradientSharing(False, False, False), GradientSharing(True, True, True)


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize(
    ("flags", "cpu", "cuda"),
    [
        ("", (False, False, False), (True, True, True)),
        ("--use-distributed-optimizer", (True, False, False), (True, True, True)),
        ("--overlap-grad-reduce", (False, True, False), (True, True, True)),
        ("--no-use-distributed-optimizer", (False, False, False), (False, True, False)),
        ("--no-overlap-param-gather", (False, False, False), (True, True, False)),
        ("--optimizer muon", (False, False, False), (False, True, False)),  # which cannot shard its state
        ("--bf16 --use-precision-aware-optimizer", (True, False, False), (True, True, True)),
    ],
)
def test_what_is_given_holds_and_the_rest_follows(flags: str, cpu, cuda, on_cuda: bool) -> None:
    """A gather overlaps only where there is a distributed optimizer that reduces early: Megatron asks for both."""
    config = parse(flags.split())
    assert config.gradient_sharing(on_cuda, 4) == GradientSharing(*(cuda if on_cuda else cpu))


@pytest.mark.parametrize(
    ("sizes", "world", "sharing"),
    [
        ("", 1, NOTHING),
        ("--tensor-model-parallel-size 8", 8, NOTHING),
        ("--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2", 8, NOTHING),
        ("--tensor-model-parallel-size 4", 8, EVERYTHING),
        ("--context-parallel-size 8", 8, EVERYTHING),  # they hold the same weights too
    ],
)
def test_only_ranks_of_the_same_weights_count(sizes: str, world: int, sharing: GradientSharing) -> None:
    assert parse(sizes.split()).gradient_sharing(True, world) == sharing
