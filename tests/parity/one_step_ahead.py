"""The trainer with the host a step ahead of what it knows, as it is on CUDA."""

import pretrain_skyladder
from megatron_ext.engine.platform import Platform

Platform.steps_ahead = 1  # type: ignore[assignment, method-assign]


def main(argv: list[str]) -> int:
    return pretrain_skyladder.main(argv)
