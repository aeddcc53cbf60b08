"""Every check of a run's stages: each of its own configuration, and of those that follow one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megatron_ext.config.stages import Stage
from megatron_ext.config.validation import mistakes
from megatron_ext.errors import UserError


def check_stages(stages: Sequence[Stage], world_size: int) -> None:
    """Raise UserError with one line per mistake of any stage, or return."""
    found = [
        (f"stage {stage.name}: {line}" if stage.name else line)
        for stage in stages
        for line in (*mistakes(stage.config, world_size), *_before(stage))
    ]
    found += [line for stage, following in itertools.pairwise(stages) for line in _joined_alike(stage, following)]
    if found:
        raise UserError("\n".join(found))


def _before(stage: Stage) -> Iterator[str]:
    if stage.before is not None and stage.config.checkpoint.init_from is None:
        yield f"save: got nothing, needs a folder that holds the checkpoint of stage {stage.before.name}; add --save"


def _joined_alike(stage: Stage, following: Stage) -> Iterator[str]:
    """The processes join once for all the stages that they run."""
    for name in ("device", "distributed_timeout_minutes"):
        then, now = (getattr(one.config.parallel, name) for one in (stage, following))
        if now != then:
            yield f"stage {following.name}: {name}: got {now}, needs {then} as {stage.name} has; give one for all"
