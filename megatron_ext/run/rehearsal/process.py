"""Sets one process up as a rank of a run, rehearses, and writes what it found."""

from __future__ import annotations

import json
import logging
import os
import warnings
from dataclasses import asdict
from pathlib import Path

from megatron_ext.config.arguments import parse
from megatron_ext.run.rehearsal.meter import Meter
from megatron_ext.run.rehearsal.request import Request


def run(request: Request, result_file: str) -> None:
    """Rehearse as the request says and write the result's JSON."""
    os.environ.update(
        RANK=str(request.rank), WORLD_SIZE=str(request.world_size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0" if request.world_size == 1 else "29500" if request.fake else os.environ["MASTER_PORT"],
    )  # fmt: skip
    if request.fake:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # nobody meets: no port is looked at, a job's is its own
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    meters: list[Meter] = []
    if request.fake:
        from megatron_ext.run.rehearsal import pretence

        def noted(what: str) -> None:
            for meter in meters:
                meter.wait(what)

        pretence.begin(noted, transformer_engine=request.layers == "transformer_engine")
    from megatron_ext.run.rehearsal.rank import rehearse  # Megatron takes what is patched by name

    config = parse(request.argv)
    device = "cuda" if request.fake else "cpu"
    found = rehearse(config, request.windows, request.documents, device, meters, expert_load=request.expert_load)
    Path(result_file).write_text(json.dumps(asdict(found)), encoding="utf-8")
