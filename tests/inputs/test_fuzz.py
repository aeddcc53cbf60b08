"""Random damage to every kind of file that is read: an answer or one clear line, in bounded time and memory."""

import hashlib
import json
import resource
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.checkpoint.folders import locate
from megatron_ext.checkpoint.hf.config import FAMILIES
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, read_model_config
from megatron_ext.checkpoint.manifest import FileFacts, Manifest, facts_of
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse_stages, to_dict
from megatron_ext.config.checks import check_stages
from megatron_ext.data.indexed import IndexedSource
from megatron_ext.data.packing.plan import PackingPlan, PlanKey, load_plan, plan_folder, save_plan
from megatron_ext.data.text.documents import read_documents
from megatron_ext.errors import UserError
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity
from tests.checkpoint.models import SIZES

LIMIT_S = 30
MEMORY = 3 * 2**30
NAMES = ["../x", "/etc/passwd", "llama3", "yarn", "none", "nan", "x" * 3000]
NUMBERS = [10**400, -(10**400), 2**31, 2**63, 2**64, 10**12, 0, -1]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 300), st.floats(), st.text(max_size=8))
SCALARS |= st.sampled_from(NUMBERS) | st.sampled_from(NAMES)
NAMED = partial(st.dictionaries, st.text(max_size=6), max_size=3)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | NAMED(inner), max_leaves=6)
SLOWLY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
fuzzed = settings(max_examples=60, suppress_health_check=SLOWLY, deadline=None)
long = settings(fuzzed, max_examples=1500)


def spoilt(raw: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with some cut out, put in or overwritten."""

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        content = raw
        for place, gone, new in edits:
            content = content[:place] + new + content[place + gone :]
        return content

    bits = st.binary(max_size=9) | st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\xff" * 7 + b"\x7f", b"[", b"{", b'"'])
    edit = st.tuples(st.integers(0, len(raw)), st.integers(0, 9), bits)
    return st.lists(edit, min_size=1, max_size=3).map(apply)


@contextmanager
def limits() -> Iterator[None]:
    """Fail what takes too long, and let what wants too much memory have none."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError(f"still not done after {LIMIT_S} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def fuzz(effort: settings, values: Any, write: Any, read: Callable[[], object], refused: Sequence[Any] = ()) -> None:
    """Write each value and read it: that succeeds, or fails with a message, which cli.py shortens.

    Those that must be refused are not drawn.
    """

    def message(value: Any) -> str | None:
        write(value)
        with limits():
            try:
                read()
            except (UserError, OSError) as error:
                return str(error)
        return None

    @effort
    @given(values)
    def run(value: Any) -> None:
        assert message(value) != ""

    assert all(map(message, refused))
    run()


@pytest.fixture(params=[fuzzed, pytest.param(long, marks=pytest.mark.slow)], ids=["short", "long"])
def effort(request: pytest.FixtureRequest) -> settings:
    """Run a test quickly, and at length among the slow ones."""
    return request.param


def test_configurations(effort: settings, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    names = [(section, name) for section, entries in to_dict(Config()).items() for name in entries]
    good = json.dumps({"model": {"vocab_size": 64}, "data": {"data_path": ["x"], "seq_length": 64}}, indent=1).encode()
    odd_text = st.text(alphabet="&*a:[]{}!<|>-?\n #'\"%@`1x", max_size=30).map(str.encode)

    def write_values(entries: list[tuple[tuple[str, str], Any]]) -> None:
        content: dict[str, dict[str, Any]] = {"model": {"vocab_size": 64}, "data": {"data_path": ["x"]}}
        for (section, name), value in entries:
            content.setdefault(section, {})[name] = value
        file.write_text(json.dumps(content))

    def read() -> None:
        check_stages(parse_stages(["--config", str(file)]), 1)

    texts = spoilt(good) | st.binary(max_size=40) | odd_text
    fuzz(effort, texts, file.write_bytes, read, [b"model: " + b"[" * 3000])
    fuzz(effort, st.lists(st.tuples(st.sampled_from(names), VALUES), max_size=4), write_values, read)


def test_indexes_of_data_sets(effort: settings, tmp_path: Path) -> None:
    lengths = np.array([3, 2, 4], dtype=np.int32)
    pointers = np.array([0, 6, 10], dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    good = header + lengths.tobytes() + pointers.tobytes() + np.arange(4, dtype=np.int64).tobytes()
    (tmp_path / "x.bin").write_bytes(np.arange(9, dtype=np.uint16).tobytes())
    (tmp_path / "x.idx").write_bytes(good)
    assert IndexedSource(tmp_path / "x", 64).document_lengths.tolist() == [3, 2, 4]

    def read() -> None:
        source = IndexedSource(tmp_path / "x", 64)
        for document, length in enumerate(source.document_lengths):
            source.read(document, 0, int(length))

    fuzz(effort, spoilt(good), (tmp_path / "x.idx").write_bytes, read)


def test_lines_of_documents(effort: settings, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    good = b'{"text": "one"}\n{"text": "t\\u00e9", "more": [1, {"a": null}]}\n'
    values = spoilt(good) | VALUES.map(lambda value: json.dumps({"text": value}).encode() + b"\n")
    fuzz(effort, values, file.write_bytes, lambda: list(read_documents([file])))


def test_manifests(effort: settings, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "iter_0000002"
    folder.mkdir(parents=True)
    (folder / "tensors_00000.safetensors").write_bytes(b"x")
    facts: dict[str, FileFacts] = {"tensors_00000.safetensors": facts_of(folder / "tensors_00000.safetensors")}
    Manifest(2, 4, {"tensor": 1}, to_dict(Config()), {"a": 1}, {"python": "3"}, facts, 0.5).write(folder)
    good = (folder / "manifest.json").read_bytes()
    assert locate(tmp_path) is not None

    def write_values(values: dict[str, Any]) -> None:
        """Write values with the right checksum, as anyone can."""
        content = {name: value for name, value in (json.loads(good) | values).items() if name != "sha256"}
        checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps({"sha256": checksum} | content))

    def read() -> None:
        checkpoint = locate(tmp_path)
        if checkpoint is not None:
            checkpoint.manifest.check_files(checkpoint.folder, checkpoint.manifest.files, content=False)
            Pretrained.find(tmp_path)

    names = st.sampled_from(sorted(json.loads(good)))
    fuzz(effort, st.dictionaries(names, VALUES, min_size=1, max_size=2), write_values, read)
    fuzz(effort, spoilt(good), (folder / "manifest.json").write_bytes, read)


LLAMA = SIZES | {"model_type": "llama", "rope_theta": 10_000.0, "tie_word_embeddings": False}
MORE = ["rope_scaling", "head_dim", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"]
MORE += ["no_rope_layers", "no_rope_layer_interval", "partial_rotary_factor", "num_experts", "hidden_act"]
OF_ANGLES = ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "mscale", "beta_fast"]
OF_ANGLES += ["original_max_position_embeddings", "attention_factor", "mscale_all_dim"]
KINDS = st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default"])
ANGLES = st.dictionaries(st.sampled_from(OF_ANGLES), SCALARS | KINDS, max_size=5)


def test_models_of_hugging_face(effort: settings, tmp_path: Path) -> None:
    config, index = tmp_path / "config.json", tmp_path / "model.safetensors.index.json"
    entries = st.dictionaries(st.sampled_from([*LLAMA, *MORE]), VALUES | ANGLES, max_size=3)
    good = json.dumps({"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}).encode()
    maps = st.dictionaries(st.text(max_size=3), VALUES, max_size=2)

    def write_config(edit: tuple[str, dict[str, Any]]) -> None:
        config.write_text(json.dumps(LLAMA | {"model_type": edit[0]} | edit[1]))

    families = st.sampled_from(sorted(FAMILIES))
    read = partial(read_model_config, tmp_path)
    fuzz(effort, st.tuples(families, entries), write_config, read)
    digits = b'{"hidden_size": ' + b"9" * 5000 + b"}"
    fuzz(effort, st.just(digits), config.write_bytes, read, [digits])
    indexes = spoilt(good) | maps.map(lambda weights: json.dumps({"weight_map": weights}).encode())
    fuzz(effort, indexes, index.write_bytes, lambda: HuggingFaceTensors(tmp_path))


def spoilt_file(folder: Path) -> tuple[st.SearchStrategy[tuple[Path, bytes]], Callable[[tuple[Path, bytes]], None]]:
    """Return damage to one of a folder's files, and the function that writes it and restores the others."""
    good = {path: path.read_bytes() for path in folder.iterdir()}

    def write(change: tuple[Path, bytes]) -> None:
        for path, raw in (good | dict([change])).items():
            path.write_bytes(raw)

    return st.sampled_from(sorted(good)).flatmap(lambda path: st.tuples(st.just(path), spoilt(good[path]))), write


def test_plans(effort: settings, tmp_path: Path) -> None:
    key = PlanKey("best_fit", 8, 1, {}, "f")
    plan = PackingPlan(key, np.array([0, 1, 3]), np.array([[0, 0, 8], [1, 0, 3], [2, 0, 5]]), 16)
    save_plan(plan, tmp_path / "data")
    assert load_plan(tmp_path / "data", key).rows == 2
    fuzz(effort, *spoilt_file(plan_folder(tmp_path / "data", key)), lambda: load_plan(tmp_path / "data", key))


def test_stores_of_scores(effort: settings, tmp_path: Path) -> None:
    identity = StoreIdentity(2, 16, 8, 6, 1, 64, "d", "p", "t", "m")
    folder = tmp_path / "store"
    store = ScoreStore.create_or_resume(folder, identity)
    for row in range(2):
        store.write(row, np.ones(16, dtype=np.float32))
    described = json.loads((folder / "zarr.json").read_bytes())

    def write_values(values: dict[str, Any]) -> None:
        (folder / "zarr.json").write_text(json.dumps(described | values))

    def read() -> None:
        for row in range(2):
            ScoreStore.create_or_resume(folder, identity).read(row)

    read()
    fuzz(effort, *spoilt_file(folder), read)
    changes = st.dictionaries(st.sampled_from(sorted(described)), VALUES, min_size=1, max_size=2)
    fuzz(effort, changes, write_values, read, [{"codecs": [{"name": "pickle"}]}, {"shape": [10**15, 64]}])
