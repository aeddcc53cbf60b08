"""Megatron-Core runs on a CPU, and needs each of the patches; warnings about ranks whose environments differ."""

import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from megatron_ext.config import Config
from megatron_ext.engine import environment, platform
from tests.conftest import SmallData, refused
from tests.engine.fake_modules import empty
from tests.engine.needed import needed
from tests.launcher import call
from tests.runs import attempt

RUN_WITHOUT = "tests/engine/run_without.py"
FLAGS = ["--train-iters", "1", "--lr-warmup-iters", "0", "--seq-length", "64", "--use-distributed-optimizer"]
# of a build for the CPU; of one for CUDA where there is no driver, or no GPU that it may see
NO_CUDA = "Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
PIPELINE = ["--pipeline-model-parallel-size", "2", "--no-untie-embeddings-and-output-weights"]
# how one step fails without each patch; the distributed optimizer and a pipeline with tied embeddings meet all of them
FAILURES = dict.fromkeys(("current_device", "current_stream", "factories", "move_to_cuda", "random_state"), NO_CUDA)
FAILURES["type_names"] = "Wrapped parameters must be one of torch.cuda.FloatTensor"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needed(name)) for name in FAILURES])
def test_a_run_fails_without(small_data: SmallData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where this fails, Megatron-Core no longer needs the patch: remove it from platform.PATCHES."""
    monkeypatch.setenv("WITHOUT", name)
    result = attempt([*small_data.flags, *FLAGS, *PIPELINE], 2, tmp_path / "run", RUN_WITHOUT)
    assert result.returncode == 1
    assert re.search(FAILURES[name], result.stderr), result.stderr[-3000:]


@pytest.fixture
def patched() -> Iterator[None]:
    """All patches installed, as in a process that has not yet used a device."""
    platform.uninstall_cpu()
    _device_constructors.cache_clear()
    platform.install_cpu()
    yield
    platform.uninstall_cpu()


@pytest.mark.usefixtures("patched")
def test_only_what_goes_to_cuda_comes_to_the_cpu() -> None:
    assert torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
    assert torch.tensor([1.0], device=torch.device("cuda", 3)).device.type == "cpu"
    assert torch.full((2,), 3, device=torch.cuda.current_device()).tolist() == [3, 3]
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == torch.empty(2).device.type == "meta"
    platform.uninstall_cpu()
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == torch.empty(2).device.type == "meta"


def test_a_missing_device_is_refused() -> None:
    assert refused(platform.choose, "cuda").endswith("; use --device cpu")


def told(rank: int, environments: list[environment.Environment]) -> list[str]:
    """Return the warnings of a process, whose environment is the one of its rank."""
    return environment.differences(environments[rank])


def test_differences_between_ranks_are_reported_once_per_host() -> None:
    here = environment.look(Config(), platform.choose("auto"))
    first = replace(here, host="n1", versions=here.versions | {"torch": "2.11.0"})
    second = replace(first, host="n2", versions={**first.versions, "pyarrow": None, "torch": "2.10.0"})
    assert call(told, 2, [first, replace(first, host="n2")]) == [[], []]
    lines = [
        f"warning: pyarrow on n2: None; on n1: {first.versions['pyarrow']}",
        "warning: torch on n2: 2.10.0; on n1: 2.11.0",
    ]
    assert call(told, 3, [first, second, second]) == [lines, [], []]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that can be found, without Transformer Engine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles with it in the first step, and would end the run with a traceback."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither gcc nor clang" in refused(platform.choose, "cuda")
    for name in ("gcc", "clang"):
        (tmp_path / name).touch(mode=0o755)
        assert platform.compiler() == str(tmp_path / name)
        (tmp_path / name).unlink()
    monkeypatch.setenv("CC", "icx")
    assert platform.compiler() == "icx"


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_pythons_headers_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Triton's compilation needs one. It may be elsewhere, so this is no error."""
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    for is_there in (False, True):
        caplog.clear()
        platform.choose("cuda")
        assert ("Python.h" in caplog.text) is not is_there
        (tmp_path / "Python.h").touch()


@pytest.mark.usefixtures("gpu")
def test_a_transformer_engine_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run does not fall back to slower layers without a word."""
    assert not platform.find("cuda").transformer_engine
    monkeypatch.setitem(sys.modules, "transformer_engine", empty("transformer_engine"))  # without its part for torch
    assert "transformer-engine" in refused(platform.find, "cuda")


def test_a_job_with_gpus_does_not_fall_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is too old for torch would otherwise show in the speed alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert platform.find("auto").device.type == "cpu"  # the user hides them
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "device: got auto in a job with 8 GPUs" in refused(platform.find, "auto")
    assert platform.find("cpu").device.type == "cpu"
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert platform.find("auto").device.type == "cpu"
