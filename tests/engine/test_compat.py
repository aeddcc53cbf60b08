"""Patches of Megatron-Core work, and a test for each fails when Megatron-Core no longer needs it."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_ext import engine
from megatron_ext.config import Config
from megatron_ext.engine import compat, platform
from megatron_ext.engine.transformer import transformer_config
from tests.conftest import SmallData, refused
from tests.engine.needed import needed, numbers
from tests.launcher import ROOT, call
from tests.runs import CONFIG, attempt

# before any test replaces them
MEGATRONS_ROTATION = rope_utils._apply_rotary_pos_emb_bshd
SHARES_STORAGE = getattr(compat.megatron_random, "_get_share_storage", None)
RUN_WITHOUT = "tests/engine/run_without.py"
SHORT = ("--train-iters", "2", "--lr-warmup-iters", "0", "--seq-length", "64")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.15.3", "0.16.0", "0.20.0rc0", "0.160.1"):
        monkeypatch.setattr(megatron.core, "__version__", version)
        assert refused(engine.check_version).startswith(
            f"megatron-core: got {version}, needs >=0.16.1,<0.20; pip install "
        )
    for version in ("0.16.1", "0.17.0rc1", "0.19.12"):
        monkeypatch.setattr(megatron.core, "__version__", version)
        engine.check_version()


ANOTHER_VERSION = """
import sys, megatron.core, megatron.core.optimizer.optimizer_config as old, pretrain_skyladder
megatron.core.__version__ = "0.15.3"
del old.ParamKey
sys.exit(pretrain_skyladder.main(sys.argv[1:]))
"""


def test_another_version_is_refused_before_a_name_is_missing(small_data: SmallData) -> None:
    command = [sys.executable, "-c", ANOTHER_VERSION, *CONFIG, *map(str, small_data.flags)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: megatron-core: got 0.15.3, needs ")


def test_a_transformer_engine_that_megatron_did_not_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron catches an ImportError, for example of a renamed module, and builds its classes on nothing."""
    cpu_platform = platform.Platform(torch.device("cpu"), "gloo", transformer_engine=True)
    monkeypatch.setattr(platform, "find", lambda device: cpu_platform)
    monkeypatch.setattr(compat.megatron_random, "HAVE_TE", True)
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", True)
    assert platform.choose("auto") == cpu_platform
    monkeypatch.setattr(compat.megatron_random, "HAVE_TE", False)
    assert "from which Megatron-Core " in refused(platform.choose, "auto")


ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def test_a_model_does_not_set_how_transformer_engine_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ATTENTION:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)  # put back after the test as they were
    cpu = platform.Platform(torch.device("cpu"), "gloo", transformer_engine=False)
    GPTModel._set_attention_backend(SimpleNamespace(config=transformer_config(Config(), cpu)))
    assert not set(ATTENTION) & set(os.environ)


@needed("an extension for a layer that is not run")
def test_upstream_still_requires_apex_for_a_layer_that_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, the output layer needs no extension that it never calls: remove the allowance."""
    layers = compat.megatron_layers
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, gradient_accumulation_fusion=True, use_cpu_initialization=True)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    options = {"config": config, "init_method": lambda weight: weight, "bias": False, "tp_group": group}

    def build() -> torch.nn.Module:
        return layers.ColumnParallelLinear(8, 16, **options)

    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda module is not found"):
        build()
    compat.install_without_transformer_engine()
    assert build().weight.shape == (16, 8)


@needed("the default of recomputation for fp8")
def test_upstream_still_requires_transformer_engine_to_recompute_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, CheckpointWithoutOutput takes no fp8 as it is: compat need not set its default."""
    checkpoint = compat.megatron_random.CheckpointWithoutOutput
    if hasattr(compat.megatron_random, "FP8GlobalStateManager"):
        pytest.skip("Transformer Engine is here, which it asks")
    monkeypatch.setattr(checkpoint.__init__, "__defaults__", (False,))
    x = torch.randn(3, requires_grad=True)
    platform.install_cpu()
    try:
        with pytest.raises(NameError, match="FP8GlobalStateManager"):
            checkpoint().checkpoint(torch.square, x)
        compat.install_without_transformer_engine()
        torch.testing.assert_close(checkpoint().checkpoint(torch.square, x), x.square())
    finally:
        platform.uninstall_cpu()


@needed("norms")
def test_upstream_norm_still_refuses_sequence_parallel() -> None:
    """Where this fails, see whether WrappedTorchNorm marks its weight too: then remove `_MarkedNorm`."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "tensor_model_parallel_size": 2}
    norm = {"normalization": "RMSNorm", "persist_layer_norm": False}
    assert isinstance(WrappedTorchNorm(TransformerConfig(**sizes, **norm), 8), torch.nn.RMSNorm)
    with pytest.raises(AssertionError, match="sequence parallel not supported by torch LayerNorm"):
        WrappedTorchNorm(TransformerConfig(**sizes, **norm, sequence_parallel=True), 8)


@needed("copy_storage")
def test_megatron_still_compiles_to_recompute_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, it needs no compiler: remove compat.copy_storage."""
    assert "load_inline" in inspect.getsource(SHARES_STORAGE)
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", None)
    platform.choose("cpu")
    x = torch.randn(4, 6, requires_grad=True)
    kept = compat.megatron_random.CheckpointWithoutOutput()
    normed = kept.checkpoint(torch.sigmoid, x)
    halves = normed.view(8, 3)  # saved for backward, as the parts of experts are
    out = (halves * halves).sum() + (normed * normed).sum()
    kept.discard_output_and_register_recompute(out)
    assert normed.untyped_storage().size() == 0
    out.backward()
    expected = x.detach().sigmoid()
    torch.testing.assert_close(x.grad, 4 * expected * expected * (1 - expected))


@pytest.mark.slow
@needed("FusedAdam")
def test_a_loaded_state_still_has_no_step(small_data: SmallData, tmp_path: Path, monkeypatch) -> None:
    """Where this fails, a run can continue with torch's AdamW: remove engine/adam.py."""
    monkeypatch.setenv("WITHOUT", "optimizer")
    run = tmp_path / "run"
    flags = [*small_data.flags, *SHORT, "--use-distributed-optimizer", "--load", run, "--load-if-present"]
    first = attempt([*flags, "--lr-decay-iters", 4], 1, run, RUN_WITHOUT)
    second = attempt([*flags, "--train-iters", 4], 1, run, RUN_WITHOUT)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 1
    assert "KeyError: 'step'" in second.stderr, second.stderr[-3000:]


def test_install_optimizer_replaces_only_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fused_adam = object()
    for module in (compat.megatron_optimizer, compat.megatron_distributed):
        monkeypatch.setattr(module, "Adam", fused_adam)
    monkeypatch.setattr(compat.megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    compat.install_optimizer()
    assert compat.megatron_optimizer.Adam is fused_adam
    compat.megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    compat.install_optimizer()
    compat.install_optimizer()
    assert compat.megatron_optimizer.Adam is compat.megatron_distributed.Adam is compat.FusedAdam
    assert not compat.megatron_optimizer.USING_PYTORCH_OPTIMIZER


@needed("the version of a missing Transformer Engine")
def test_megatron_still_compares_the_version_of_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, remove that part of compat.install_without_transformer_engine."""
    monkeypatch.setattr(compat.megatron_utils, "_te_version", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(TypeError):
        compat.megatron_utils.is_te_min_version("2.1.0")
    compat.install_without_transformer_engine()
    assert not compat.megatron_utils.is_te_min_version("0.1")


@needed("a name of the router")
def test_megatrons_router_still_lacks_a_name_without_transformer_engine() -> None:
    """Where this fails, the name is there: remove that part of compat.install_without_transformer_engine."""
    spec = importlib.util.find_spec("megatron.core.transformer.moe.moe_utils")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    if fresh.HAVE_TE:
        pytest.skip("Transformer Engine has it")
    assert not hasattr(fresh, "te_general_gemm")
    compat.install_without_transformer_engine()
    assert compat.megatron_experts.te_general_gemm is None


@needed("counts_on_host")
def test_megatrons_dispatcher_still_needs_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, it makes its stream on CUDA alone: remove compat.counts_on_host."""
    assert "torch.cuda.Stream()" in inspect.getsource(compat.MoEAlltoAllTokenDispatcher.__init__)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.cuda.Stream()
    counts = torch.tensor([3, 1])
    splits = {"input_splits": counts, "output_splits": None, "output_splits_tp": counts}
    dispatcher = SimpleNamespace(cuda_dtoh_point="here", **splits)
    assert compat.counts_on_host(dispatcher, "elsewhere", counts) is counts
    assert dispatcher.input_splits is counts
    compat.counts_on_host(dispatcher, "here", counts)
    assert dispatcher.input_splits.tolist() == [3, 1]
    assert dispatcher.output_splits is None


def share_unevenly(rank: int) -> dict[str, list[float] | bool]:
    """Gather 2 rows of rank 0 and 3 of rank 1; add up 5 rows of both, of which they keep as many."""
    group = torch.distributed.group.WORLD
    sizes = [2, 3]
    rank_rows = torch.full((sizes[rank], 1), float(rank + 1))
    gathered = compat.uneven_gather(rank_rows, group, sizes)
    summed = compat.uneven_reduce_scatter(torch.arange(5.0)[:, None] * (rank + 1), group, sizes)
    try:
        torch.distributed.all_gather(list(torch.empty(5, 1).split(sizes)), rank_rows, group=group)
        supported = True
    except RuntimeError:
        supported = False
    return {"gathered": gathered[:, 0].tolist(), "summed": summed[:, 0].tolist(), "supported": supported}


def test_gloo_still_does_not_gather_uneven_rows() -> None:
    """Where `supported` is true, gloo takes them: remove compat.uneven_gather and uneven_reduce_scatter."""
    first, second = call(share_unevenly, 2)
    assert first == {"gathered": [1, 1, 2, 2, 2], "summed": [0, 3], "supported": False}
    assert second == {"gathered": [1, 1, 2, 2, 2], "summed": [6, 9, 12], "supported": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [8, 4], ids=["whole heads", "half heads"])
@needed("rotate")
def test_the_rotation_is_bit_equal_to_megatrons(dtype: torch.dtype, rotated: int) -> None:
    angles_t11R = torch.randn(6, 1, 1, rotated // 2).repeat(1, 1, 1, 2)
    heads, gradient = torch.randn(2, 6, 1, 3, 8, dtype=dtype)
    results = []
    for rotate in (MEGATRONS_ROTATION, compat.rotate):
        leaf = heads.clone().requires_grad_()
        out = rotate(leaf, angles_t11R)
        out.backward(gradient)
        results.append((out, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert "torch.cat" in inspect.getsource(MEGATRONS_ROTATION), "it copies no more: compat.rotate can go from install"


def test_the_oldest_supported_torch_still_needs_one_by_one() -> None:
    """torch 2.13 crashed. Where this fails, gather and reduce 300 buckets asynchronously with torch's own
    _coalescing_manager, in two processes: if none crashes in twenty runs under the oldest torch, remove one_by_one."""
    (oldest,) = re.findall(r'"torch>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    assert numbers(oldest) <= (2, 13)


@needed("process_groups")
def test_the_private_names_of_upstream_are_still_called_in_this_way() -> None:
    """Where this fails, adapt what compat.py makes of them, or see whether it is still needed."""
    states = inspect.signature(DistributedOptimizer._get_main_param_and_optimizer_states).parameters
    assert list(states) == ["self", "model_param"]
    forgets = inspect.getsource(parallel_state.destroy_model_parallel)
    assert "    _global_process_group_list = None" in forgets
    assert forgets.count("_global_process_group_list") == 2, "its groups are destroyed: compat.process_groups can go"


def test_muon_needs_a_later_megatron_and_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions before 0.18 have another Muon and no registry; without the package the registry is there."""
    monkeypatch.setattr(compat.megatron_optimizer, "_EMERGING_OPTIMIZERS", {}, raising=False)
    monkeypatch.setattr(compat.megatron_optimizer, "HAVE_EMERGING_OPTIMIZERS", True, raising=False)
    compat.check_muon()
    monkeypatch.setattr(compat.megatron_optimizer, "HAVE_EMERGING_OPTIMIZERS", False)
    assert "optimizer: got muon, needs emerging-optimizers and " in refused(compat.check_muon)
    monkeypatch.setattr(compat.megatron_optimizer, "HAVE_EMERGING_OPTIMIZERS", True)
    monkeypatch.delattr(compat.megatron_optimizer, "_EMERGING_OPTIMIZERS")
    assert f"0.18 or later, got {megatron.core.__version__}; " in refused(compat.check_muon)
