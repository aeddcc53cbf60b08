"""The score store: what it keeps, what it refuses, and what is left of it when its writers are killed."""

import contextlib
import multiprocessing
import random
import signal
import time
from dataclasses import asdict, fields, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import zarr

from megatron_ext.files.fingerprint import fingerprint
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from tests.conftest import refused

SIZES = {"rows": 7, "row_length": 64, "short_context": 16, "short_stride": 12, "seed": 5, "vocab_size": 1000}
IDENTITY = StoreIdentity(**SIZES, **{name: fingerprint(name) for name in ("data", "packing", "tokenizer", "model")})
OTHERS = {
    field.name: fingerprint("another") if field.type is str else getattr(IDENTITY, field.name) + 1
    for field in fields(StoreIdentity)
}
# The server that processes are forked from has imported the store and nothing else of this test run.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["megatron_ext.token_weighting.store", "pytest"])


DAMAGES = {"truncated": lambda content: content[:-1], "zeros whose checksum fits": lambda content: bytes(4)}


def losses_of(row: int, length: int = IDENTITY.row_length) -> np.ndarray:
    return np.random.default_rng(row).exponential(2.0, length).astype(np.float32)


def filled(path: Path, identity: StoreIdentity = IDENTITY, without: tuple[int, ...] = ()) -> ScoreStore:
    store = ScoreStore.create_or_resume(path, identity)
    for row in sorted(set(range(identity.rows)) - set(without)):
        store.write(row, losses_of(row, identity.row_length))
    return store


def test_the_format_is_plain_zarr_with_one_file_per_row(tmp_path: Path) -> None:
    filled(tmp_path / "store", without=(2,))
    array = zarr.open_array(tmp_path / "store", mode="r")
    assert (array.metadata.zarr_format, array.dtype, array.shape) == (3, np.float32, (7, 64))
    assert {**array.attrs, "kind": None} == {**asdict(IDENTITY), "kind": None}
    assert np.array_equal(array[5], losses_of(5))
    assert np.array_equal(ScoreStore.open(tmp_path / "store", first=3).read(5), losses_of(5))
    assert np.isnan(array[2]).all()
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert names == {"zarr.json"} | {f"c.{row}.0" for row in range(7) if row != 2}


@pytest.mark.parametrize("name", OTHERS)
def test_another_identity_is_refused_by_field(tmp_path: Path, name: str) -> None:
    filled(tmp_path / "store")
    assert ScoreStore.open(tmp_path / "store", **asdict(IDENTITY)).identity == IDENTITY
    other_identity = replace(IDENTITY, **{name: OTHERS[name]})
    assert f"its {name} is " in refused(ScoreStore.create_or_resume, tmp_path / "store", other_identity)
    assert f"its {name} is " in refused(ScoreStore.open, tmp_path / "store", **{name: OTHERS[name]})


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_row_is_refused_and_can_be_rewritten(tmp_path: Path, damage: str) -> None:
    store = filled(tmp_path / "store", without=(1,))
    file = tmp_path / "store" / "c.4.0"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    assert "; delete c.4.0 there, then run the" in refused(store.read, 4)
    file.unlink()
    assert store.missing([6, 4, 3, 1]) == [4, 1]
    for bad in (np.nan, np.inf):
        losses = np.where(np.isin(np.arange(IDENTITY.row_length), (17, 40)), bad, losses_of(4))
        assert "row 4 has a loss that is not finite, at token 17;" in refused(store.write, 4, losses)
    assert "row 1 the first; run the scoring command" in refused(ScoreStore.open, tmp_path / "store")
    assert "1 of the 2 rows" in refused(ScoreStore.open, tmp_path / "store", first=3, rows=5)
    store.write(4, losses_of(4))
    assert ScoreStore.open(tmp_path / "store", first=2).missing(range(7)) == [1]


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "note").write_text("mine")
    zarr.create_array(tmp_path / "array", shape=(7, 64), dtype="float32")
    for name in ("file", "folder", "array"):
        assert refused(ScoreStore.create_or_resume, tmp_path / name, IDENTITY)
    for name, text in (("file", "no store"), ("nothing", "no store"), ("array", "cannot be read")):
        assert text in refused(ScoreStore.open, tmp_path / name)
    assert (tmp_path / "folder" / "note").read_text() == (tmp_path / "file").read_text() == "mine"


def score(path: Path, identity: StoreIdentity, done: Connection, most: int | None) -> None:
    """Write the missing rows and send the number of each; after the first `most`, wait to be killed."""
    store = ScoreStore.create_or_resume(path, identity)
    for row in store.missing(range(identity.rows))[:most]:
        store.write(row, losses_of(row, identity.row_length))
        done.send(row)
    if most is not None:
        signal.pause()


def start_scoring(path: Path, identity: StoreIdentity, most: int | None = None) -> tuple[BaseProcess, Connection]:
    reader, writer = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=score, args=(path, identity, writer, most))
    process.start()
    writer.close()
    return process, reader


def received(reader: Connection) -> list[int]:
    """Return what a process sends until it ends."""
    rows = []
    with reader, contextlib.suppress(EOFError):
        while True:
            rows.append(reader.recv())
    return rows


def kill_a_writer(path: Path, identity: StoreIdentity, chance: random.Random) -> int:
    """SIGKILL a writer at a random moment; return how many rows were complete that it had not reported."""
    before = set(range(identity.rows))
    if path.exists():
        before = set(ScoreStore.create_or_resume(path, identity).missing(range(identity.rows)))
    process, reader = start_scoring(path, identity, most=30)
    early = [reader.recv() for _ in range(chance.randint(1, 5))]
    time.sleep(chance.uniform(0, 0.03))
    process.kill()
    written = early + received(reader)
    process.join()
    assert process.exitcode == -9
    store = ScoreStore.create_or_resume(path, identity)
    after = set(store.missing(range(identity.rows)))
    assert {row for row in range(identity.rows) if not (path / f"c.{row}.0").exists()} == after, "a row is half written"
    assert len(written) == len(set(written))
    assert set(written) <= before - after, "a row is lost"
    assert all(np.array_equal(store.read(row), losses_of(row, identity.row_length)) for row in before - after)
    return len(before - after) - len(written)


def test_a_killed_writer_loses_and_doubles_nothing(tmp_path: Path) -> None:
    chance = random.Random(3)
    identity = replace(IDENTITY, rows=120, row_length=65_536)
    for _ in range(3):
        assert kill_a_writer(tmp_path / "store", identity, chance) in (0, 1)
    missing_rows = ScoreStore.create_or_resume(tmp_path / "store", identity).missing(range(identity.rows))
    process, reader = start_scoring(tmp_path / "store", identity)
    assert received(reader) == missing_rows
    process.join()
    store = ScoreStore.open(tmp_path / "store", **asdict(identity))
    assert all(np.array_equal(store.read(row), losses_of(row, 65_536)) for row in range(identity.rows))
