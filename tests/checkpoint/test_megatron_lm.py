"""Checkpoints that Megatron-Core itself writes and loads: the same losses before and after a conversion."""

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_ext.batch import pack
from megatron_ext.checkpoint.folders import find_checkpoint
from megatron_ext.checkpoint.hf.config import comparable
from megatron_ext.checkpoint.megatron_lm import (
    _Source,
    arguments,
    flags,
    megatron_lm_to_megatron,
    megatron_to_megatron_lm,
    model_config,
    training_config,
)
from megatron_ext.checkpoint.pretrained import Pretrained
from megatron_ext.checkpoint.tensors import Stored
from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.inference.model import open_model
from tests.checkpoint.megatron_core import FULL_QUERIES, LATENT, MOE, SMALL, YARN, model_of
from tests.config.megatron_lm import READ_FROM_CHECKPOINTS, defaults
from tests.conftest import refused, slow_but
from tests.launcher import call
from tools.translate_megatron_lm import Arguments

TOKENS = torch.randint(0, 120, (33,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def losses_of(model: Any) -> list[float] | None:
    """The loss of every token on the last stage, None on others; in fp32, also of weights in bf16."""
    from megatron.core import parallel_state

    model.float()
    tokens = TOKENS[None, :-1]
    positions = torch.arange(32)[None]
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    if not model.pre_process:
        hidden = torch.empty(32, 1, model.config.hidden_size, dtype=model.config.params_dtype)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    out = model(tokens, positions, mask, labels=TOKENS[None, 1:])
    if model.post_process:
        return out[0].tolist()
    dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def save(
    rank: int, folder: Path, version: str, args: dict[str, Any], layout: dict[str, int], options: dict[str, Any]
) -> Any:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    model = model_of(args, layout)
    options = dict(options)
    renamed = options.pop("renamed", {})
    release = options.pop("release", False)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide that norms are exchanged
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    options["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata=options)
    for part in nested_values(state):
        if isinstance(part, ShardedBase):
            for old, new in renamed.items():
                part.key = part.key.replace(old, new)
    checkpoint = folder / ("release" if release else "iter_0000007")
    checkpoint.mkdir(parents=True, exist_ok=True)
    all_args = Namespace(**defaults(version) | args)
    dist_checkpointing.save({**state, "args": all_args, "iteration": 7}, str(checkpoint))
    (folder / "latest_checkpointed_iteration.txt").write_text("release" if release else "7")
    return losses_of(model)


def load(rank: int, folder: Path, args: dict[str, Any], layout: dict[str, int]) -> Any:
    from megatron.core import dist_checkpointing, parallel_state

    model = model_of(args, layout)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {"model": model.sharded_state_dict(metadata={"dp_cp_group": group})}
    model.load_state_dict(dist_checkpointing.load(state, str(folder))["model"])
    return losses_of(model)


def ours(rank: int, run: Path) -> list[float]:
    with torch.no_grad(), open_model(Pretrained.find(run), ParallelConfig(), 32, "float32") as model:
        row = TokenRow(TOKENS.numpy(), np.array([], dtype=np.int64), np.ones(32, dtype=bool))
        logits = model.chunks[0].logits(pack([row], 32, model.config.mask_options()))
    dist.destroy_process_group()
    return torch.nn.functional.cross_entropy(logits.float(), TOKENS[1:], reduction="none").tolist()


TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
UNFUSED = {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
LOCAL = {"self_attention.linear_qkv.layer_norm_": "input_layernorm.", **UNFUSED}
LATENT_FUSED = {"self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_"}
LATENT_FUSED |= {"self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_"}
LATENT_FUSED |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
EP2_PP2 = {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "stacked": ("0.16.1", {}, TP2_PP2, {}),
    "single": ("0.19.0", {}, TP2_PP2, {"non_homogeneous_layers": True}),
    "tied-local-names": ("0.16.1", {"untie_embeddings_and_output_weights": False}, TP2_PP2, {"renamed": LOCAL}),
    "bf16": ("d98e8a64", {"params_dtype": torch.bfloat16}, TP2_PP2, {}),
    "llama3-release": ("0.16.1", {"use_rope_scaling": True, "rope_scaling_factor": 4.0}, TP2_PP2, {"release": True}),
    "linear": ("d98e8a64", {"rotary_seq_len_interpolation_factor": 4}, TP2_PP2, {}),
    "no-rope": ("0.19.0", {"no_rope_freq": 2}, TP2_PP2, {}),
    "uneven": ("0.19.0", {"pipeline_model_parallel_layout": "Ettt|tL"}, {"pipeline_model_parallel_size": 2}, {}),
    "latent-moe": ("0.16.1", MOE | LATENT | {"moe_layer_freq": [0, 1, 1, 0]}, {"pipeline_model_parallel_size": 2}, {}),
    "latent-yarn-fused": ("0.19.0", LATENT | YARN | FULL_QUERIES, TP2_PP2, {"renamed": LATENT_FUSED}),
    "moe": ("d98e8a64", MOE, EP2_PP2, {"renamed": UNFUSED}),
    "moe-some": ("0.19.0", MOE | {"moe_layer_freq": [0, 1, 1, 0]}, {"pipeline_model_parallel_size": 2}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["stacked", "moe"], VARIANTS))
def test_losses_stay_both_ways(tmp_path: Path, name: str) -> None:
    """TP 2 and PP 2, or EP 2 and PP 2, are read into our model, and written into another layout of theirs."""
    version, changes, layout, options = VARIANTS[name]
    args = SMALL | changes
    source = tmp_path / "theirs"
    run = tmp_path / "run"
    back = tmp_path / "back"
    processes = layout.get("tensor_model_parallel_size", 1) * layout.get("expert_model_parallel_size", 1) * 2
    before = next(filter(None, call(save, processes, source, version, args, layout, options)))
    megatron_lm_to_megatron(source, run)
    converted = call(ours, 1, run, group=False)[0]
    words = megatron_to_megatron_lm(run, back)
    if name == "stacked":  # no option that a model without latent attention or experts does not have
        assert words == ["--load", str(back), "--finetune", "--use-checkpoint-args", "--norm-epsilon", "1e-06"]
    export_layout = {"pipeline_model_parallel_size": 2} if "expert_model_parallel_size" in layout else {}
    after = next(filter(None, call(load, 1 + len(export_layout), back / "iter_0000000", args, export_layout)))
    for losses in (converted, after):
        assert losses == pytest.approx(before, abs=1e-5)
    megatron_lm_to_megatron(back, tmp_path / "again", iteration=0)  # what we write is also what we read
    first, again = (Pretrained.find(folder) for folder in (run, tmp_path / "again"))
    assert again.model == first.model
    read = {name: value for name, value in _Source(back, 0).args.items() if name in READ_FROM_CHECKPOINTS}
    arguments = Arguments([word for word in words if word != "--finetune"])
    assert not arguments.decide
    assert comparable(model_config(defaults(version) | read | arguments.values, 128)) == comparable(first.model)
    if "num_experts" in args:
        training = parse(["--config", str(run / "config.yaml")]).training
        assert (training.moe_router_load_balancing_type, training.moe_aux_loss_coeff) == ("aux_loss", 0.01)
    stored = Stored(first.folder), Stored(again.folder)
    assert {tensor.dtype for tensor in stored[0].tensors.values()} == {"BF16" if name == "bf16" else "F32"}
    for tensor in stored[0].tensors:
        assert torch.equal(*(checkpoint.read(tensor) for checkpoint in stored))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "learned_absolute"),
        ("normalization", "LayerNorm"),
        ("multi_latent_attention", True),  # with fewer key heads
        ("mtp_num_layers", 1),
        ("rotary_percent", 0.5),
        ("softmax_type", "off-by-one"),
        ("layernorm_zero_centered_gamma", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"]),
        ("window_size", (15, 3)),
        ("spec", ["module", "function"]),
        ("enable_mhc_connections", True),
        ("argument_of_the_future", 0.5),
        ("num_layers", None),
    ],
)
def test_what_is_not_representable_is_named(field: str, value: object) -> None:
    args = defaults("0.19.0") | SMALL | MOE
    model_config(args | {"argument_of_the_future": None}, 128)
    assert field in refused(model_config, args | {field: value}, 128)


def test_one_expert_with_sigmoid_scores_is_another_function() -> None:
    """Megatron-Core divides by the sum of scores only where there are several; here it is always 1."""
    args = defaults("0.19.0") | SMALL | MOE | {"moe_router_score_function": "sigmoid"}
    assert "moe_router_topk: got 1 with sigmoid" in refused(model_config, args | {"moe_router_topk": 1}, 128)


def test_attention_sinks_are_named_where_a_checkpoint_does_not_say_them() -> None:
    words = flags(arguments(ModelConfig(num_layers=4, vocab_size=128, softmax_type="learnable")))
    assert words[words.index("--softmax-type") + 1] == "learnable"


def test_an_unknown_argument_can_be_accepted() -> None:
    args = defaults("0.19.0") | SMALL
    assert model_config(args | {"other": 1}, 128, ("other",)) == model_config(args, 128)


def test_what_training_loses_is_named(caplog: pytest.LogCaptureFixture) -> None:
    args = defaults("0.19.0") | SMALL | MOE | {"moe_z_loss_coeff": 1e-3, "decoupled_lr": 1e-4}
    training_config(args | {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, bf16=True)
    for name in ("moe_z_loss_coeff", "decoupled_lr", "moe_router_load_balancing_type"):
        assert f"{name}: got" in caplog.text


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_formats_and_folders_are_told_apart(tmp_path: Path) -> None:
    legacy = tmp_path / "legacy" / "iter_0000001"
    dtensor = tmp_path / "dtensor"
    (legacy / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").write_text("1")
    dtensor.mkdir()
    (dtensor / ".metadata").touch()
    kinds = {"gone": "does not exist", "dtensor": "fsdp_dtensor", "": "has format 'none'", "legacy": "legacy"}
    kinds |= {"legacy/iter_0000001": "legacy", "legacy/iter_0000001/mp_rank_00": "legacy"}
    for name, text in kinds.items():
        assert text in refused(megatron_lm_to_megatron, tmp_path / name, tmp_path.parent / "run")
    for folder in (tmp_path / "legacy", legacy, dtensor):  # a trainer names the command that converts it
        assert "megatron-lm-to-megatron --input" in refused(Pretrained.find, folder)
        config = parse(["--load", str(folder), "--load-if-present"])
        assert "megatron-lm-to-megatron --input" in refused(find_checkpoint, config)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "gone"):
        assert "holds no checkpoint" in refused(Pretrained.find, tmp_path / name)


def test_nothing_is_executed(tmp_path: Path) -> None:
    folder, touched = tmp_path / "evil", tmp_path / "touched"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(touched)))
    torch.save({"args": Evil(touched)}, folder / "common.pt")
    assert "damaged" in refused(megatron_lm_to_megatron, folder, tmp_path / "run")
    assert not touched.exists()
