"""What the process of one rank is asked to rehearse."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """Says what one rank's process does.

    Attributes:
        argv: the training flags.
        world_size, rank: of the run.
        windows: in tokens.
        documents: of rows.DOCUMENTS; None for the run's own where they are here.
        expert_load: times the mean of all ranks' tokens that come to this rank's experts.
        layers: of `ranks.LAYERS`, whose modules the model is built of.
        fake: on CUDA tensors without memory; else for real, on this machine's CPU.
    """

    argv: list[str]
    world_size: int
    rank: int
    windows: list[int]
    documents: str | None
    expert_load: float = 1.0
    layers: str = "local"
    fake: bool = True

    @classmethod
    def read(cls, file: str | Path) -> Request:
        """Read what `write` wrote."""
        return cls(**json.loads(Path(file).read_text(encoding="utf-8")))

    def write(self, file: str | Path) -> None:
        """Write JSON."""
        Path(file).write_text(json.dumps(asdict(self)), encoding="utf-8")
