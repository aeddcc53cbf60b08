"""Random damage to every kind of file that is read: an answer or one clear line, in bounded time and memory."""

from __future__ import annotations

import json
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inputs.table import Change
from inputs.world import change_file
from megatron_ext.checkpoint.folders import locate
from megatron_ext.checkpoint.hf.folder import HuggingFaceTensors, read_model_config
from megatron_ext.checkpoint.manifest import FileFacts, Manifest, facts_of
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.cli import MAX_CHARACTERS
from megatron_ext.config import Config
from megatron_ext.config.arguments import parse_stages, to_dict
from megatron_ext.config.checks import check_stages
from megatron_ext.data.packing.plan import PackingPlan, PlanKey, load_plan, save_plan
from megatron_ext.data.text.documents import read_documents
from megatron_ext.engine.indexed_dataset import IndexedSource
from megatron_ext.errors import UserError
from megatron_ext.monitoring.report import table
from megatron_ext.monitoring.runs import incomparable_evaluations, load_run
from megatron_ext.token_weighting.store import ScoreStore, StoreIdentity

LIMIT_S, MEMORY = 30, 3 * 2**30
HUGE = [10**400, -(10**400), 2**31, 2**63, 2**64, 10**12, 0, -1]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from(HUGE)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "llama3", "yarn", "none", "nan", "x" * 3000])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
fuzzed = settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
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


def answered(read: Callable[[], object]) -> None:
    """Whatever it reads, it gives an answer or refuses with a text that a user can be shown."""
    said = "fine"
    with limits():
        try:
            read()
        except (UserError, OSError) as error:
            said = str(error)
    assert 0 < len(said) < 20 * MAX_CHARACTERS, said[:2000]


def both(name: str) -> Any:
    """Run a test quickly, and at length among the slow ones."""
    return pytest.mark.parametrize(name, [fuzzed, pytest.param(long, marks=pytest.mark.slow)], ids=["short", "long"])


@both("effort")
def test_configurations(effort: settings, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    sections = to_dict(Config())
    names = st.sampled_from([(section, name) for section, entries in sections.items() for name in entries])
    good = json.dumps({"model": {"vocab_size": 64}, "data": {"data_path": ["x"], "seq_length": 64}}, indent=1).encode()

    def read() -> None:
        check_stages(parse_stages(["--config", str(file)]), 1)

    @effort
    @given(
        spoilt(good)
        | st.binary(max_size=40)
        | st.text(alphabet="&*a:[]{}!<|>-?\n #'\"%@`1x", max_size=30).map(str.encode)
    )
    def of_bytes(raw: bytes) -> None:
        file.write_bytes(raw)
        answered(read)

    @effort
    @given(st.lists(st.tuples(names, VALUES), max_size=4))
    def of_values(entries: list[tuple[tuple[str, str], Any]]) -> None:
        content: dict[str, dict[str, Any]] = {"model": {"vocab_size": 64}, "data": {"data_path": ["x"]}}
        for (section, name), value in entries:
            content.setdefault(section, {})[name] = value
        file.write_text(json.dumps(content))
        answered(read)

    of_bytes()
    of_values()


@both("effort")
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

    @effort
    @given(spoilt(good))
    def of_bytes(raw: bytes) -> None:
        (tmp_path / "x.idx").write_bytes(raw)
        answered(read)

    of_bytes()


@both("effort")
def test_lines_of_documents(effort: settings, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    good = b'{"text": "one"}\n{"text": "t\\u00e9", "more": [1, {"a": null}]}\n'

    @effort
    @given(spoilt(good) | VALUES.map(lambda value: json.dumps({"text": value}).encode() + b"\n"))
    def of_bytes(raw: bytes) -> None:
        file.write_bytes(raw)
        answered(lambda: list(read_documents([file])))

    of_bytes()


@both("effort")
def test_manifests(effort: settings, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "iter_0000002"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x")
    facts: dict[str, FileFacts] = {"__0_0.distcp": facts_of(folder / "__0_0.distcp")}
    Manifest(2, 4, {"tensor": 1}, to_dict(Config()), {"a": 1}, {"python": "3"}, facts, 0.5).write(folder)
    good = (folder / "manifest.json").read_bytes()
    assert locate(tmp_path) is not None
    names = st.sampled_from(sorted(json.loads(good)))

    def read() -> None:
        found = locate(tmp_path)
        if found is not None:
            found.manifest.check_sizes(found.folder, found.manifest.files)
            Pretrained.find(tmp_path)

    @effort
    @given(st.dictionaries(names, VALUES, min_size=1, max_size=2))
    def of_values(values: dict[str, Any]) -> None:
        (folder / "manifest.json").write_bytes(good)
        change_file(folder / "manifest.json", Change("seal", "", values))
        answered(read)

    @effort
    @given(spoilt(good))
    def of_bytes(raw: bytes) -> None:
        (folder / "manifest.json").write_bytes(raw)
        answered(read)

    of_values()
    of_bytes()


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MORE = ["rope_scaling", "rope_parameters", "head_dim", "sliding_window", "use_sliding_window", "max_window_layers"]
MORE += [
    "layer_types",
    "no_rope_layers",
    "no_rope_layer_interval",
    "partial_rotary_factor",
    "num_experts",
    "hidden_act",
]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "ministral", "smollm3", "qwen3_moe", "mixtral", "phi", "gemma3_text"]
ANGLES = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "mscale"])
    | st.sampled_from(["original_max_position_embeddings", "attention_factor", "beta_fast", "mscale_all_dim"]),
    SCALARS | st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default"]),
    max_size=5,
)


@both("effort")
def test_models_of_hugging_face(effort: settings, tmp_path: Path) -> None:
    names = st.sampled_from([*LLAMA, *MORE])

    @effort
    @given(st.sampled_from(FAMILIES), st.dictionaries(names, VALUES | ANGLES, max_size=3))
    def of_values(family: str, values: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": family} | values))
        answered(lambda: read_model_config(tmp_path))

    index = json.dumps({"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}).encode()

    @effort
    @given(
        spoilt(index)
        | st.dictionaries(st.text(max_size=3), VALUES, max_size=2).map(lambda m: json.dumps({"weight_map": m}).encode())
    )
    def of_indexes(raw: bytes) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(raw)
        answered(lambda: HuggingFaceTensors(tmp_path))

    of_values()
    of_indexes()


@both("effort")
def test_plans(effort: settings, tmp_path: Path) -> None:
    key = PlanKey("best_fit", 8, 1, {}, "f")
    plan = PackingPlan(key, np.array([0, 1, 3]), np.array([[0, 0, 8], [1, 0, 3], [2, 0, 5]]), {"cut": 1})
    folder = tmp_path / "plan"
    save_plan(plan, folder)
    good = {path: path.read_bytes() for path in folder.iterdir()}
    assert load_plan(folder, key).rows == 2

    @effort
    @given(st.sampled_from(sorted(good)).flatmap(lambda path: st.tuples(st.just(path), spoilt(good[path]))))
    def of_bytes(change: tuple[Path, bytes]) -> None:
        for path, raw in good.items():
            path.write_bytes(raw)
        change[0].write_bytes(change[1])
        answered(lambda: load_plan(folder, key))

    of_bytes()


@both("effort")
def test_stores_of_scores(effort: settings, tmp_path: Path) -> None:
    identity = StoreIdentity(2, 16, 8, 6, 1, 64, "d", "p", "t", "m")
    folder = tmp_path / "store"
    store = ScoreStore.create_or_resume(folder, identity)
    for row in range(2):
        store.write(row, np.ones(16, dtype=np.float32))
    good = {path: path.read_bytes() for path in folder.iterdir()}
    described = json.loads((folder / "zarr.json").read_bytes())

    def read() -> None:
        for row in range(2):
            ScoreStore.create_or_resume(folder, identity).read(row)

    read()

    @effort
    @given(st.sampled_from(sorted(good)).flatmap(lambda path: st.tuples(st.just(path), spoilt(good[path]))))
    def of_bytes(change: tuple[Path, bytes]) -> None:
        for path, raw in good.items():
            path.write_bytes(raw)
        change[0].write_bytes(change[1])
        answered(read)

    @effort
    @given(st.dictionaries(st.sampled_from(sorted(described)), VALUES, min_size=1, max_size=2))
    def of_values(values: dict[str, Any]) -> None:
        (folder / "zarr.json").write_text(json.dumps(described | values))
        answered(read)

    of_bytes()
    of_values()


@both("effort")
def test_records_of_runs(effort: settings, tmp_path: Path) -> None:
    steps = [
        {"step": step, "lm_loss": 4.0, "grad_norm": 1.0, "window": 8, "tokens_per_s": 5.0, "attention_entropy": [1.0]}
        for step in range(3)
    ]
    evaluation = {"step": 2, "valid_loss": 4.0, "by_length": {"8": 4.0}, "by_position": {"1": 4.0}, "stride": None}
    good = "".join(json.dumps(record) + "\n" for record in steps).encode()
    (tmp_path / "evaluation.jsonl").write_text(json.dumps(evaluation) + "\n")

    def read() -> None:
        run = load_run(tmp_path)
        table(run)
        run.validation_by_length()
        run.losses_by_position()
        incomparable_evaluations([run])
        run.by_layer("attention_entropy")

    @effort
    @given(spoilt(good))
    def of_bytes(raw: bytes) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(raw)
        answered(read)

    @effort
    @given(st.dictionaries(st.sampled_from(sorted(steps[0])), VALUES, max_size=3))
    def of_steps(values: dict[str, Any]) -> None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record | values) + "\n" for record in steps))
        answered(read)

    @effort
    @given(st.dictionaries(st.sampled_from(sorted(evaluation)), VALUES, max_size=3))
    def of_evaluations(values: dict[str, Any]) -> None:
        (tmp_path / "metrics.jsonl").write_bytes(good)
        (tmp_path / "evaluation.jsonl").write_text(json.dumps(evaluation | values) + "\n")
        answered(read)

    of_bytes()
    of_steps()
    of_evaluations()
