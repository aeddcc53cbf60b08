"""The books of storages, on real tensors: what is known to be allocated, freed, resized and kept."""

from __future__ import annotations

import gc

import torch

from megatron_ext.run.rehearsal.collectives import Collectives
from megatron_ext.run.rehearsal.memory import Part
from megatron_ext.run.rehearsal.meter import Meter
from megatron_ext.run.rehearsal.sites import Sites


def meter() -> Meter:
    return Meter("cpu", Sites([]), Collectives((1, 1, 1, 1)))


def test_bytes_and_peak_of_known_allocations() -> None:
    with meter() as books:
        kept = torch.zeros(1000)
        with_view = torch.ones(10, 10, dtype=torch.bfloat16)
        view = with_view.T[2:]
        total = 4000 + 200
        assert books.ledger.total == total
        temporary = torch.zeros(500) + 1.0  # two of 2,000 bytes at once
        del temporary, with_view
        assert books.ledger.total == total  # the view keeps the storage
        assert books.ledger.peak.total == total + 4000
        del view
        kept.add_(1.0)
        assert books.ledger.total == 4000
    assert books.ledger.peak.parts[Part.OTHER] == total + 4000


def test_labels_move_bytes_between_parts() -> None:
    with meter() as books:
        weight, state, other = torch.zeros(100), torch.zeros(50), torch.zeros(25)
    books.ledger.label(weight.untyped_storage(), Part.WEIGHTS)
    books.ledger.label_rest(Part.OPTIMIZER, (Part.WEIGHTS,))
    assert books.ledger.bytes[Part.WEIGHTS] == 400
    assert books.ledger.bytes[Part.OPTIMIZER] == 300
    del state, other
    assert books.ledger.bytes[Part.OPTIMIZER] == 0


def test_scratch_counts_for_the_peak_alone() -> None:
    with meter() as books:
        x = torch.zeros(100)
    books.ledger.transient(1000, Part.OTHER, "a kernel")
    assert books.ledger.total == 400
    assert books.ledger.peak.total == 1400
    assert books.ledger.peak.site == "a kernel"
    books.ledger.reset_peak()
    assert books.ledger.peak.total == x.nbytes


def test_a_storage_resized_in_place() -> None:
    with meter() as books:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert books.ledger.total == 0
        x.untyped_storage().resize_(800)
        assert books.ledger.total == books.ledger.peak.total == 800


def test_what_lives_at_the_peak_is_told_by_its_line() -> None:
    """Lines are of this package; what a test allocates has none."""
    with meter() as books:
        held = torch.zeros(100)
    assert books.ledger.peak.live_allocations == {"the run's own code": held.nbytes}


def test_circles_of_references_keep_their_storage() -> None:
    gc.disable()
    try:
        with meter() as books:
            circle: list[object] = [torch.zeros(100)]
            circle.append(circle)
            del circle
            assert books.ledger.total == 400
            gc.collect()
            assert books.ledger.total == 0
    finally:
        gc.enable()
