"""Rehearse one rank in this process: python -m megatron_ext.run.rehearsal REQUEST RESULT, two JSON files."""

from __future__ import annotations

import json
import logging
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """Describes the rehearsal of one rank.

    Attributes:
        argv: the training flags.
        world_size, rank: of the run.
        windows: in tokens.
        documents: one of rows.DOCUMENTS; None for the run's own rows if its data is present.
        expert_load: tokens of this rank's experts over the mean of all ranks.
        fake: use fake CUDA tensors without memory; otherwise real tensors on this machine's CPU.
    """

    argv: list[str]
    world_size: int
    rank: int
    windows: list[int]
    documents: str | None
    expert_load: float = 1.0
    fake: bool = True

    @classmethod
    def read(cls, file: str | Path) -> Request:
        """Read a request that `write` wrote."""
        return cls(**json.loads(Path(file).read_text(encoding="utf-8")))

    def write(self, file: str | Path) -> None:
        """Write the request as JSON."""
        Path(file).write_text(json.dumps(asdict(self)), encoding="utf-8")


def run(request: Request, result_file: str) -> None:
    """Rehearse the request and write the result as JSON."""
    os.environ.update(
        RANK=str(request.rank), WORLD_SIZE=str(request.world_size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0" if request.world_size == 1 else "29500" if request.fake else os.environ["MASTER_PORT"],
    )  # fmt: skip
    if request.fake:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no process connects to another, so no port is needed
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    from megatron_ext.run.rehearsal.meter import Meter

    meters: list[Meter] = []
    if request.fake:
        from megatron_ext.run.rehearsal import cuda_mock

        def on_sync(what: str) -> None:
            for meter in meters:
                meter.note_sync(what)

        cuda_mock.install(on_sync)
    from megatron_ext.config.arguments import parse
    from megatron_ext.run.rehearsal.rank import rehearse  # after the mock: Megatron imports patched functions by name

    device = "cuda" if request.fake else "cpu"
    found = rehearse(
        parse(request.argv), request.windows, request.documents, device, meters, expert_load=request.expert_load
    )
    Path(result_file).write_text(json.dumps(asdict(found)), encoding="utf-8")
