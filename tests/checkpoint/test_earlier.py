"""Runs of a version whose options meant something else: they go on as they were, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.changes import check
from megatron_ext.checkpoint.earlier import check_model, of_its_time
from megatron_ext.checkpoint.manifest import code_identity
from megatron_ext.config.arguments import from_dict, parse, to_dict
from megatron_ext.errors import UserError

BASE = "--data-path x --vocab-size 64 --window-rate 8"
HYBRID = f"{BASE} --window-schedule linear --local-window 64 --window-attn-skip-freq 2"
GRADUAL = f"{BASE} --window-schedule cyclic_gradual"
PHI = f"{BASE} --block phi --rotary-percent 0.5"
YARN = "--rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 128"


def earlier(flags: str, **window: Any) -> dict[str, Any]:
    """What the version before wrote: without the options that came with the new meanings."""
    saved = to_dict(parse(flags.split()))
    del saved["window"]["local_window_fixed"], saved["training"]["eval_document_mask"]
    saved["window"] |= window
    return saved


def changes(saved: dict[str, Any], flags: str) -> list[str]:
    return [str(change) for change in check(saved, parse(flags.split()), 10, "X")]


def test_local_layers_that_did_not_follow_the_schedule() -> None:
    saved = earlier(HYBRID)
    with pytest.raises(UserError, match="local_window_fixed True -> False; restore them, or add --override local_wi"):
        changes(saved, HYBRID)
    assert changes(saved, f"{HYBRID} --local-window-fixed") == []
    assert changes(saved, f"{HYBRID} --override local_window_fixed") == ["local_window_fixed True -> False"]
    constant = HYBRID.replace("linear", "constant")  # the whole row from the first step on: nothing to follow
    assert changes(earlier(constant), constant) == []
    plain = f"{BASE} --window-schedule linear"
    assert changes(earlier(plain), plain) == []


@pytest.mark.parametrize(("then", "now"), [(1, 0.5), (2, 1.5), (5, 4.5)])
def test_as_many_ramps_as_then(then: int, now: float) -> None:
    """n cycles were 2 n - 1 ramps, and are 2 n."""
    saved = earlier(GRADUAL, window_cycles=then)
    assert changes(saved, f"{GRADUAL} --window-cycles {now}") == []
    schedule = from_dict(of_its_time(saved, "X")).window_schedule()
    assert schedule.expansion_steps == (2 * then - 1) * schedule.ramp_steps
    with pytest.raises(UserError, match=rf"window_cycles {now} -> {now + 1}; restore them"):
        changes(saved, f"{GRADUAL} --window-cycles {now + 1}")


def test_ramps_that_ended_downward_are_refused() -> None:
    saved = earlier(GRADUAL, window_cycles=2.5)
    with pytest.raises(
        UserError, match=r"X has window_cycles 2.5 of an earlier version, 4 ramps; .* --override window_c"
    ):
        changes(saved, f"{GRADUAL} --window-cycles 2.5")
    assert changes(saved, f"{GRADUAL} --window-cycles 2.5 --override window_cycles") == ["window_cycles 0.5 -> 2.5"]
    jump = f"{BASE} --window-schedule cyclic_jump --window-cycles 2"
    assert changes(earlier(jump, window_cycles=2), jump) == []


def test_the_first_row_of_a_document_alone(tmp_path: Path) -> None:
    flags = f"{BASE} --packing whole_document"
    with pytest.raises(UserError, match=r"packing_options \['rows_per_document=1'\] -> \[\]; restore"):
        changes(earlier(flags), flags)
    assert changes(earlier(flags), f"{flags} --packing-options rows_per_document=1") == []
    (tmp_path / "m.yaml").write_text("[{prefix: a, packing: whole_document}, {prefix: b}]")
    mixed = f"--mixture {tmp_path / 'm.yaml'} --vocab-size 64"
    with pytest.raises(UserError, match="made with other options: mixture"):
        changes(earlier(mixed), mixed)
    (tmp_path / "m.yaml").write_text(
        "[{prefix: a, packing: whole_document, packing_options: [rows_per_document=1]}, {prefix: b}]"
    )
    assert changes(earlier(mixed), mixed) == []


def test_evaluations_inside_documents_are_a_change_to_be_told() -> None:
    flags = f"{BASE} --document-mask --eval-interval 5"
    assert changes(earlier(flags), flags) == ["eval_document_mask True -> False"]
    assert changes(earlier(flags), f"{flags} --eval-document-mask") == []
    never = f"{BASE} --document-mask"
    assert changes(earlier(never), never) == []


def test_what_this_version_wrote_stays_as_it_is() -> None:
    saved = to_dict(parse(f"{GRADUAL} --window-cycles 2.5 --packing whole_document".split()))
    assert of_its_time(saved, "X") is saved


def test_yarn_that_scaled_whole_heads_is_refused() -> None:
    """Of heads that are turned in part alone: no option computes today what it did."""
    saved, before = to_dict(parse(f"{PHI} {YARN}".split())), {"sources": "abc"}
    with pytest.raises(
        UserError, match=r"^load: X is of an earlier version, .* now the \d+ of \d+ .* rope_scaling to go"
    ):
        check_model(saved, before, "X")
    with pytest.raises(UserError, match="of an earlier version"):
        check_model(saved, before | {"model_version": "1"}, "X", ("lr",))
    check_model(saved, before, "X", ("lr", "rope_scaling"))
    check_model(saved, code_identity(), "X")


@pytest.mark.parametrize(
    "flags", [PHI, f"{PHI} {YARN} --rope-attention-factor 1", f"{BASE} {YARN}", f"{BASE} --block phi"]
)
def test_models_that_yarn_has_not_changed_go_on(flags: str) -> None:
    check_model(to_dict(parse(flags.split())), {}, "X")
