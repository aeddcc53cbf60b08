"""Translate the arguments of a run of Megatron-LM, of a checkpoint or a command line, into our options.

Each conversion below computes some of our options from the arguments that it names. All other arguments follow the
table (megatron_lm.yaml). An argument that is not given has Megatron-LM's default.
"""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config import ModelConfig
from megatron_ext.config.blocks import mlp_width
from megatron_ext.config.megatron_lm import DEFAULTS, find_argument
from megatron_ext.config.pipeline import checked_layout, write_layout
from megatron_ext.errors import UserError, echo

Args = Mapping[str, Any]
Options = dict[str, Any]


@dataclass
class Translation:
    """What becomes of a run's arguments.

    The other attributes have a line for each argument that is not in `options`: what it has and what is needed here.
    """

    options: Options = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)  # changes what the model computes
    training: dict[str, str] = field(default_factory=dict)  # changes how it is trained
    other: dict[str, str] = field(default_factory=dict)  # is done in another way here
    unknown: dict[str, str] = field(default_factory=dict)  # not in the table


def _width(args: Args) -> Options:
    width = args["ffn_hidden_size"]
    if width is None and args["hidden_size"] is not None:
        width = mlp_width(args["hidden_size"], gated=args["swiglu"])
    return {"ffn_hidden_size": width}


def _heads(args: Args) -> Options:
    if args["group_query_attention"]:
        return {"num_query_groups": args["num_query_groups"]}
    return {"num_query_groups": args["num_attention_heads"]}


def _epsilon(args: Args) -> Options:
    name = "layernorm_epsilon"
    if args[name] == DEFAULTS[name]:
        name = "norm_epsilon"  # its name until 0.15
    return {"norm_epsilon": args[name]}


def _window(args: Args) -> Options:
    window = args["window_size"]
    if isinstance(window, str):
        window = tuple(int(part) for part in window.strip("()").split(","))
    window = tuple(window or ())
    if window in ((), (-1, 0), (-1, -1)):
        return {}
    before, after = window
    if before < 0 or after != 0:
        raise UserError(f"window_size: got {window}, needs a number of tokens before each token and 0 after it")
    return {"local_window": before + 1, "window_attn_skip_freq": args["window_attn_skip_freq"]}


def _latent(args: Args) -> Options:
    """Return whether attention is latent.

    Latents always have norms here, of one epsilon. Otherwise --qk-layernorm has the same meaning in both.
    """
    if not args["multi_latent_attention"]:
        return {"qk_layernorm": args["qk_layernorm"]}
    if not args["qk_layernorm"] or _epsilon(args)["norm_epsilon"] != 1e-6:
        needs = "--qk-layernorm and --norm-epsilon 1e-6, which latents have here"
        raise UserError(f"multi_latent_attention: got True, needs {needs}")
    return {"multi_latent_attention": True}


def _yarn(args: Args) -> Options:
    """Return the positions of latent attention: YaRN, unless --rope-type is rope."""
    factor = args["rotary_scaling_factor"]
    if factor == 1:
        return {}
    mscale_all_dim = args["mscale_all_dim"]
    if factor < 1:
        raise UserError(f"rotary_scaling_factor: got {factor}, needs >= 1")
    if args["rope_type"] == "rope":
        if mscale_all_dim:  # scales the scores there all the same
            raise UserError(f"mscale_all_dim: got {mscale_all_dim}, needs 0 with --rope-type rope")
        return {}
    options = {
        "rope_scaling": "yarn",
        "rope_scaling_factor": factor,
        "rope_original_length": 4096,  # fixed there
        "rope_mscale_all_dim": mscale_all_dim,
    }
    if args["mscale"] != 1:
        rise = 0.1 * math.log(factor)
        options["rope_attention_factor"] = (rise * args["mscale"] + 1) / (rise * mscale_all_dim + 1)
    return options


def mscale(model: ModelConfig) -> float:
    """Return Megatron-LM's --mscale, from which `_yarn` computes the attention factor of a model with YaRN."""
    if model.rope_attention_factor is None or model.rope_scaling_factor == 1:
        return 1.0
    rise = 0.1 * math.log(model.rope_scaling_factor)
    scale = (model.rope_attention_factor * (rise * model.rope_mscale_all_dim + 1) - 1) / rise
    return round(scale, 12)  # to the digits that were given, from which the same factor follows


def _positions(args: Args) -> Options:
    if args["multi_latent_attention"]:
        return _yarn(args)
    factor = args["rotary_seq_len_interpolation_factor"]
    if args["use_rope_scaling"]:
        if factor:
            raise UserError(f"rotary_seq_len_interpolation_factor: got {factor}, needs none with --use-rope-scaling")
        return {
            "rope_scaling": "llama3",
            "rope_original_length": 8192,
            "rope_scaling_factor": args["rope_scaling_factor"],
        }
    if not factor:
        return {}
    return {"rope_scaling": "linear", "rope_scaling_factor": factor}


def _expert_layers(args: Args) -> Options:
    """Expand `moe_layer_freq`: every n-th layer, or a list that an expression such as ([0]+[1]*3)*2 describes."""
    every = args["moe_layer_freq"]
    if isinstance(every, str):
        try:
            every = _pattern(ast.parse(every, mode="eval").body)
        except (SyntaxError, TypeError):
            raise UserError(f"moe_layer_freq: got {echo(every)}, needs a number or lists with + and *") from None
    if not args["num_experts"] or every == 1:
        return {}
    if isinstance(every, int):
        every = [int(layer % every == 0) for layer in range(args["num_layers"])]
    return {"moe_layer_freq": every}


def _pattern(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _pattern(node.left) * _pattern(node.right)
    if isinstance(node, ast.List):
        return [_pattern(element) for element in node.elts]
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= 10_000:
        return node.value
    raise TypeError


def _kinds(args: Args) -> list[str]:
    return _listed(args["moe_router_load_balancing_type"])


def _listed(value: Any) -> list[Any]:
    """Return the values of an argument that has one value or several."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _routing(args: Args) -> Options:
    other_kinds = set(_kinds(args)) - {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"}
    if args["num_experts"] and other_kinds:
        raise UserError(f"moe_router_load_balancing_type: got {min(other_kinds)}, which chooses other experts")
    if args["num_experts"] and args["moe_router_topk"] == 1 and args["moe_router_score_function"] == "sigmoid":
        raise UserError("moe_router_topk: got 1 with sigmoid scores, which are not divided by their sum there")
    return {"moe_router_topk_scaling_factor": args["moe_router_topk_scaling_factor"] or 1.0}


def balancing(args: Args) -> Options:
    """Return how the experts of a run of Megatron-LM are balanced, in our options.

    Raises:
        UserError: several losses, or the one over the global batch.
    """
    kinds = _kinds(args)
    coefficients = args["moe_aux_loss_coeff"]
    if not isinstance(coefficients, list | tuple):
        coefficients = [coefficients] * len(kinds)
    losses = {kind: number for kind, number in zip(kinds, coefficients, strict=False) if number and kind != "none"}
    if not args["num_experts"] or not losses:
        return {}
    if len(losses) > 1 or not losses.keys() <= {"aux_loss", "seq_aux_loss"}:
        raise UserError(f"moe_router_load_balancing_type: got {echo(losses)}, needs one of aux_loss and seq_aux_loss")
    ((kind, coefficient),) = losses.items()
    return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}


def _decay(args: Args) -> Options:
    if args["lr_decay_style"] != "WSD":
        return {"lr_decay_style": args["lr_decay_style"]}
    fall = args["lr_wsd_decay_style"]
    if fall != "linear":
        raise UserError(f"lr_wsd_decay_style: got {echo(fall)}, needs 'linear'")
    return {"lr_decay_style": "WSD", "lr_wsd_decay_iters": _steps(args, "lr_wsd_decay")}


def _steps(args: Args, name: str) -> int | None:
    """Return NAME_iters, or NAME_samples in steps, of which both are 0 or None if not given."""
    samples = args[f"{name}_samples"]
    if not samples:
        steps: int | None = args[f"{name}_iters"]
        return steps
    if not args["global_batch_size"]:
        raise UserError(f"{name}_samples: got {samples}, needs --global-batch-size to become steps")
    return int(samples) // int(args["global_batch_size"])


def _length(args: Args) -> Options:
    return {"train_iters": _steps(args, "train"), "lr_decay_iters": _steps(args, "lr_decay")}


def _warmup(args: Args) -> Options:
    steps = _steps(args, "lr_warmup")
    if args["lr_warmup_fraction"]:
        whole = _steps(args, "lr_decay") or _steps(args, "train")
        if whole is None:
            raise UserError(f"lr_warmup_fraction: got {args['lr_warmup_fraction']}, needs --train-iters")
        steps = round(args["lr_warmup_fraction"] * whole)
    if not steps:
        return {}
    return {"lr_warmup_iters": steps, "lr_warmup_from_zero": True}


def _ranks(args: Args) -> Options:
    """Return options of the layout; an optimization that is off there is the platform's choice here."""
    tensor = args["tensor_model_parallel_size"]
    kind = _listed(args["cp_comm_type"])[0]
    switches = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    return {
        "sequence_parallel": bool(args["sequence_parallel"] and tensor > 1),
        "make_vocab_size_divisible_by": args["make_vocab_size_divisible_by"] * tensor,
        "cp_scheme": {"a2a": "ulysses"}.get(kind, "auto"),
        **{name: True for name in switches if args[name]},
    }


_DIVISION = (
    "pipeline_model_parallel_layout decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split num_virtual_stages_per_pipeline_rank"
)


def _stages(args: Args) -> Options:
    """Return how layers are divided over pipeline stages; virtual stages divide each stage's layers evenly."""
    stages = args["pipeline_model_parallel_size"]
    size = args["num_layers_per_virtual_pipeline_stage"]
    layout, first, last, embedding, loss, virtual = (args[name] for name in _DIVISION.split())
    if stages == 1 or not any((layout, first, last, embedding, loss, virtual)):
        return {"num_layers_per_virtual_pipeline_stage": size}
    if layout:
        return {"pipeline_model_parallel_layout": checked_layout(str(layout))}
    set_sizes = [layers for layers in (first, last) if layers]
    slots = args["num_layers"] + bool(embedding) + bool(loss)
    sizes = [(slots - sum(set_sizes)) // max(stages - len(set_sizes), 1)] * stages
    sizes[0] = first or sizes[0]
    sizes[-1] = last or sizes[-1]
    if not virtual:
        virtual = 1
        if size:
            virtual = sizes[0] // size
    chunks = [layers // virtual for _ in range(virtual) for layers in sizes]
    chunks[0] -= bool(embedding)
    chunks[-1] -= bool(loss)
    if sum(chunks) != args["num_layers"]:
        raise UserError(
            f"pipeline_model_parallel_size: got {stages}, needs stages that {args['num_layers']} layers fill"
        )
    if len(set(chunks)) > 1:
        return {"pipeline_model_parallel_layout": write_layout(chunks)}
    if virtual == 1:
        return {}
    return {"num_layers_per_virtual_pipeline_stage": chunks[0]}


def _fp8(args: Args) -> Options:
    if not args["fp8"]:
        return {}
    recipe = args["fp8_recipe"]
    if recipe not in ("tensorwise", "blockwise", "mxfp8"):
        raise UserError(
            f"fp8_recipe: got {echo(recipe)}, needs tensorwise, blockwise or mxfp8; without it bf16 is used"
        )
    return {"fp8_format": args["fp8"], "fp8_recipe": recipe}


def _recompute(args: Args) -> Options:
    granularity = args["recompute_granularity"]
    if args["recompute_activations"]:
        granularity = "selective"
    modules = args["recompute_modules"]
    unlike = set(modules or ()) - {"core_attn", "layernorm", "mlp"}
    if unlike:
        raise UserError(f"recompute_modules: got {min(unlike)}, needs core_attn, layernorm and mlp")
    names = {"full": ["recompute_method", "recompute_num_layers"], "selective": ["recompute_modules"]}
    return {"recompute_granularity": granularity} | {name: args[name] for name in names.get(granularity, ())}


def _data(args: Args) -> Options:
    path = args["data_path"] or args["train_data_path"]
    if args["mock_data"] and not path:  # with one, a branch of the script has each
        raise UserError("mock_data: got True, needs --data-path with a dataset; tools/preprocess_data.py writes one")
    if path and not args["data_path"]:
        return {"data_path": path, "split": "100,0,0"}  # validation has data of its own
    split = None
    if args["split"]:
        split = str(args["split"]).replace(" ", "")
    elif path:
        split = "969,30,1"
    return {"data_path": path, "split": split}


def _batch(args: Args) -> Options:
    if args["global_batch_size"] is None and args["micro_batch_size"] is not None:
        needs = "--micro-batch-size times the number of data-parallel ranks"
        raise UserError(f"global_batch_size: not given, needs {needs}")
    return {"global_batch_size": args["global_batch_size"]}


def _evaluation(args: Args) -> Options:
    if not args["eval_iters"]:
        return {}
    return {"eval_interval": args["eval_interval"], "eval_iters": args["eval_iters"]}


def _masks(args: Args) -> Options:
    return {"document_mask": bool(args["reset_attention_mask"] or args["dataloader_inter_document_masking"])}


def _tokenizer(args: Args) -> Options:
    kind = args["tokenizer_type"]
    if kind == "HuggingFaceTokenizer" or not (kind or args["vocab_file"]):
        return {"tokenizer_model": args["tokenizer_model"], "vocab_size": args["vocab_size"]}
    if kind == "NullTokenizer" and args["vocab_size"]:
        size = args["vocab_size"]
        needs = f"{size + 1} for Megatron-Core 0.16.1, which adds the end of a document, and {size} for 0.19.2"
        raise UserError(f"vocab_size: got {size} with NullTokenizer, needs {needs}")
    model = args["tokenizer_model"] or args["vocab_file"]
    raise UserError(
        f"tokenizer_type: got {echo(kind)} with {echo(model)}, needs --tokenizer-model FOLDER with tokenizer.json; "
        "tools/convert_tokenizer.py writes it from SentencePiece and tiktoken"
    )


def _start(args: Args) -> Options:
    load = args["load"] or args["pretrained_checkpoint"]
    if not load:
        return {}
    is_new = any(args[name] for name in ("finetune", "no_load_optim", "pretrained_checkpoint"))
    if is_new or load != args["save"]:
        raise UserError(
            f"load: got {echo(load)}, a checkpoint of Megatron-LM; tools/convert_checkpoint.py megatron-lm-to-megatron "
            "converts it for --init-from"
        )
    return {"load": load, "load_if_present": not args["exit_on_missing_checkpoint"]}


def _muon(args: Args) -> Options:
    mode = args["muon_tp_mode"]
    if "muon" in args["optimizer"] and args["tensor_model_parallel_size"] > 1 and mode != "duplicated":
        raise UserError(f"muon_tp_mode: got {echo(mode)}, needs 'duplicated': it orthogonalizes whole matrices here")
    return {"muon_nesterov": args["muon_nesterov"] or args["muon_use_nesterov"]}  # its name in 0.16


# conversion: the arguments that it reads and the table therefore does not carry
_MODEL: dict[Callable[[Args], Options], str] = {
    _width: "ffn_hidden_size",
    _heads: "num_query_groups group_query_attention",
    _epsilon: "layernorm_epsilon norm_epsilon",
    _window: "window_size window_attn_skip_freq",
    _positions: "use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor rope_type "
    "rotary_scaling_factor mscale mscale_all_dim",
    _latent: "multi_latent_attention qk_layernorm",
    _expert_layers: "moe_layer_freq",
    _routing: "moe_router_topk_scaling_factor",
}
_TRAINING: dict[Callable[[Args], Options], str] = {
    balancing: "moe_router_load_balancing_type moe_aux_loss_coeff",
    _decay: "lr_wsd_decay_style lr_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
    _length: "train_samples train_iters lr_decay_iters lr_decay_samples",
    _warmup: "lr_warmup_fraction lr_warmup_iters lr_warmup_samples",
    _ranks: "sequence_parallel make_vocab_size_divisible_by cp_comm_type use_distributed_optimizer overlap_grad_reduce "
    "overlap_param_gather attention_backend",
    _stages: f"{_DIVISION} num_layers_per_virtual_pipeline_stage",
    _fp8: "fp8_recipe fp8",
    _recompute: "recompute_modules recompute_granularity recompute_method recompute_num_layers recompute_activations",
    _data: "mock_data data_path train_data_path split",
    _batch: "global_batch_size",
    _evaluation: "eval_interval eval_iters",
    _masks: "reset_attention_mask dataloader_inter_document_masking",
    _tokenizer: "tokenizer_type tokenizer_model vocab_file merge_file vocab_size",
    _start: "load finetune no_load_optim no_load_rng pretrained_checkpoint exit_on_missing_checkpoint",
    _muon: "muon_tp_mode muon_nesterov muon_use_nesterov",
}
# option: the beginnings of others' names that are read only with it
_READ_WITH = {
    "multi_latent_attention": ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "num_experts": ("moe_", "expert_model_"),
    "moe_router_enable_expert_bias": ("moe_router_bias_update_rate",),
    "use_precision_aware_optimizer": ("main_", "exp_avg_"),
    "optimizer_cpu_offload": ("optimizer_offload_fraction",),
    "save": ("save_interval", "async_save"),
    "eval_interval": ("valid_data_path",),
}
# argument: the first one of its conversion, under whose name a refusal is listed
CONVERTED = {name: names.split()[0] for names in (_MODEL | _TRAINING).values() for name in names.split()}


def translate(arguments: Args) -> Translation:
    """Return our options for arguments of Megatron-LM by name, and a line for each one that has no place here."""
    args = DEFAULTS | dict(arguments)
    if args.get("use_rotary_position_embeddings"):
        args["position_embedding_type"] = "rope"
    result = Translation()
    for name, value in args.items():
        argument = find_argument(name)
        if argument is None:
            if value:
                result.unknown[name] = f"{name}: got {echo(value)}, which this version does not know"
        elif argument.group in ("model", "training") and not argument.allows(value):
            refusals = getattr(result, argument.group)
            refusals[name] = f"{name}: got {echo(value)}, needs {argument.needed!r} ({argument.text})"
        elif argument.group == "carried" and name not in CONVERTED:
            if not argument.has_same_name and not argument.allows(value):
                result.other[name] = f"{name}: got {echo(value)}, here {argument.text}"
            elif argument.has_same_name and value is not None:
                result.options[name] = value
    for conversions, lines in ((_MODEL, result.model), (_TRAINING, result.training)):
        for convert, names in conversions.items():
            name = names.split()[0]
            try:
                result.options |= {name: value for name, value in convert(args).items() if value is not None}
            except UserError as error:
                lines[name] = str(error)
            except (TypeError, ValueError, ZeroDivisionError):
                lines[name] = f"{name}: got {echo(args[name])}, needs a value of Megatron-LM and what it depends on"
    unread = [prefix for name, prefixes in _READ_WITH.items() if not result.options.get(name) for prefix in prefixes]
    if result.options.get("optimizer") != "muon":
        unread.append("muon_")
    if result.options.get("multi_latent_attention"):
        unread.append("kv_channels")
    for name in list(result.options):
        if name.startswith(tuple(unread)):
            del result.options[name]
    return result
