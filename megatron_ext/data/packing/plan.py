"""Packing plans: which piece of which document is where in which row, created once, memory-mapped and read as rows.

    document   0: a a a a a        1: b b b        2: c c c c c c c             L = 6
    row 0      a a a a a c     pieces (0, 0, 5), (2, 0, 1)
    row 1      c c c c c c     pieces (2, 1, 6)
    row 2      b b b . . .     pieces (1, 0, 3), and three tokens of padding

A plan is a pure function of its key, and has its own folder:

    PREFIX.packing/best_fit-8192-1f0c5a77d2e9/
        plan.json          the key
        row_offsets.npy    int64 [R+1]
        pieces.npy         int64 [P, 3]
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_ext.arrays import Int64
from megatron_ext.cli import program
from megatron_ext.data.indexed import Documents, IndexedSource
from megatron_ext.data.kept import LARGE, kept_arrays
from megatron_ext.errors import UserError, first_line
from megatron_ext.files.arrays import save_array
from megatron_ext.files.atomic import atomic_folder

PLAN = "plan.json"
OFFSETS = "row_offsets.npy"
PIECES = "pieces.npy"


@dataclass(frozen=True)
class PlanKey:
    """All inputs of a plan, with every option of the policy; only `bm25` also reads the tokens of the documents."""

    policy: str
    row_length: int
    seed: int
    options: Mapping[str, int | float]
    fingerprint: str


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Rows as pieces of documents: row r has the pieces row_offsets[r] .. row_offsets[r+1] (int64 [R+1]), at least one.

    A piece, a row of int64 [P, 3], is the document (index into the data set), its first token used, and the number of
    tokens, >= 1. The pieces of a row are in order and have at most L tokens; the rest of the row is padding. All rows
    together have `tokens` tokens.
    """

    key: PlanKey
    row_offsets: Int64
    pieces: Int64
    tokens: int

    @property
    def row_length(self) -> int:
        """L, in tokens."""
        return self.key.row_length

    @property
    def rows(self) -> int:
        """R, the number of rows of one epoch."""
        return len(self.row_offsets) - 1

    @property
    def joined(self) -> bool:
        """Whether the documents of a row are joined into one text without borders."""
        return bool(self.key.options.get("join_sources"))

    def row_pieces(self, row: int) -> Int64:
        return self.pieces[self.row_offsets[row] : self.row_offsets[row + 1]]


def fingerprint(source: IndexedSource, documents: Documents, cache: Path | None = None) -> str:
    """Return the SHA-256 of the documents of a split, and of all documents' lengths and sources (if known).

    The hash of a large data set is kept in `cache`, unless it is None.
    """
    if cache is None or not isinstance(documents, range) or len(documents) < LARGE:
        return _hash_documents(source, documents).hex()
    key = {"index": source.index_fingerprint, "first_document": documents.start, "documents": len(documents)}
    kept = kept_arrays(cache, key, lambda: {"sha256": np.frombuffer(_hash_documents(source, documents), np.uint8)})
    return kept["sha256"].tobytes().hex()


def _hash_documents(source: IndexedSource, documents: Documents) -> bytes:
    digest = hashlib.sha256()
    for numbers in (source.document_lengths, documents, source.document_sources):
        if numbers is not None:
            values = np.ascontiguousarray(numbers, dtype="<i8")
            digest.update(len(values).to_bytes(8, "little"))
            digest.update(values.data)
    return digest.digest()


def plan_folder(prefix: str | Path, key: PlanKey) -> Path:
    """Return the folder of the plan with this key, named after the data set and a digest of the key."""
    text = json.dumps(asdict(key), sort_keys=True)
    short = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Path(f"{prefix}.packing") / f"{key.policy}-{key.row_length}-{short}"


def save_plan(plan: PackingPlan, prefix: str | Path, record: Mapping[str, object] | None = None) -> None:
    """Write a plan; `record` is added to plan.json."""
    with atomic_folder(plan_folder(prefix, plan.key)) as partial:
        save_array(partial / OFFSETS, plan.row_offsets)
        save_array(partial / PIECES, plan.pieces)
        content = {**asdict(plan.key), "rows": plan.rows, "tokens": plan.tokens, **(record or {})}
        (partial / PLAN).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_plan(prefix: str | Path, key: PlanKey) -> PackingPlan:
    """Open the plan with this key, memory-mapped; raise UserError if it is missing or damaged."""
    folder = plan_folder(prefix, key)
    try:
        offsets = np.load(folder / OFFSETS, mmap_mode="r")
        pieces = np.load(folder / PIECES, mmap_mode="r")
        about = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        tokens = int(about["tokens"])
    except FileNotFoundError:
        raise UserError(
            f"packing: {prefix} has no {key.policy} plan for seq_length {key.row_length} and seed "
            f"{key.seed}; make it with {program('pack')} and the flags of this run"
        ) from None
    except Exception as error:  # numpy parses the header as Python literals
        raise UserError(f"packing: the plan {folder} is damaged ({first_line(error)}); build it again") from None
    return PackingPlan(key, offsets, pieces, tokens)
