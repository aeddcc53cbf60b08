"""What a cluster is like beyond its cards' peaks: facts/cluster.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from megatron_ext.files.yaml_file import read_typed
from megatron_ext.planning.step_time import FACTS, Positive

NotNegative = Annotated[float, Ge(0)]


@dataclass(config=ConfigDict(extra="forbid", frozen=True))
class Cluster:
    """Holds facts/cluster.yaml: see there for meanings and units."""

    jitter: NotNegative
    slow_share: Annotated[float, Ge(0), Le(1)]
    slow_by: Annotated[float, Ge(1)]
    message: NotNegative
    mtbf: Positive
    restart: NotNegative
    save_card: Positive
    save_all: Positive
    save_begin: NotNegative
    save_end: NotNegative
    host_copy: Positive


@cache
def read_cluster(path: Path = FACTS / "cluster.yaml") -> Cluster:
    """Read a file of a cluster's properties.

    Raises:
        UserError: a field is missing, unknown or out of range.
    """
    return read_typed(path, Cluster)
