"""The outsider: repeats a run from what --dump-trajectory left, knowing nothing of this package.

Transformers' own Llama in eager attention with dense masks, torch's own AdamW and clipping. The masks come
straight from the papers' formulas (arXiv 2503.15450): token i sees j where floor(i/w)*w <= j <= i (sliding:
i - w <= j <= i; sliding_w: i - w < j <= i; local layers of window n: i - n < j <= i) and, under the document mask,
i and j lie in one document; a document ends after its end token. Token weights are the dumped ones, or its own by
arXiv 2503.09202: |log p_long - log p_short|, the short context being chunks of n tokens that score their last s, dense
with lambda. Experts are balanced row by row, by Switch Transformer's equations 4 to 6 (arXiv 2101.03961) with every one
of a token's choices counted; those of sigmoid routers by DeepSeek-V3's 17 to 20, and by the bias of its section 2.1.2
(arXiv 2412.19437).
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

Rule = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (i, j) -> token i may see token j, were they one document


@dataclass(frozen=True)
class Repeated:
    """What the outsider measured: losses and gradient norm of each step, and the weights at the end.

    Of each step also [B, L]: the tokens' weights in the loss, and with `own_weights` their short-context losses (NaN
    where both contexts are the same).
    """

    lm_loss: list[float]
    train_loss: list[float]
    grad_norm: list[float]
    weights: dict[str, np.ndarray]
    token_weights: list[np.ndarray]
    short_losses: list[np.ndarray]
    balance: list[float]


def repeat(
    trajectory: Path,
    learning_rates: Sequence[float],
    *,
    window: int | None = None,
    bases: bool = True,
    own_weights: bool = False,
) -> Repeated:
    """Train as many steps as there are learning rates.

    Args:
        trajectory: the dump.
        learning_rates: of each step, from metrics.jsonl.
        window: instead of the dumped ones (for the negative control).
        bases: whether the rotary base follows the window where the run's does (else a negative control).
        own_weights: weigh tokens by the paper instead of taking the dumped weights (unfrozen, abs, dense alone).
    """
    options = json.loads((trajectory / "optimizer.json").read_text())
    model = _model(trajectory)
    _mask_layers(model, options)
    _silence_positions(model, options["no_rope_freq"])
    optimizer = _optimizer(model, options)
    counts = _count_choices(model)
    steps = []
    for step, rate in enumerate(learning_rates):
        batch = dict(np.load(trajectory / f"step_{step:06d}.npz"))
        if bases and options["rope_window_bases"]:
            _set_base(model, options["rope_window_bases"], int(batch["window"]))
        seen = rules(options, window or batch["window"])
        masks = [dense_masks(batch, rule, options["document_mask"]) for rule in seen]
        optimizer.zero_grad()
        plain, weighted, *weighting_arrays = _backward(model, batch, masks, options, own_weights=own_weights)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad"]))
        steps.append((plain, weighted, norm, *weighting_arrays))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for router, tokens in counts.items():
            rise = options["moe_router_bias_update_rate"] * torch.sign(tokens.mean() - tokens)
            router.e_score_correction_bias += rise
            tokens.zero_()
    losses, trained_on, norms, *weighting_arrays = map(list, zip(*steps, strict=True))
    return Repeated(losses, trained_on, norms, _weights(model), *weighting_arrays)


def rules(options: dict[str, Any], window: int) -> list[Rule]:
    """Return the rule of layers that follow the schedule, then the rule of local ones."""
    local = options["local_window"] or 0  # 0: there are no local layers, and no one looks

    def scheduled(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        first = {"grid": i // window * window, "sliding": i - window, "sliding_w": i - window + 1}
        return first[options["window_mask"]] <= j

    def of_local_layers(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return (i - j < local) & (options["local_window_fixed"] | scheduled(i, j))

    return [scheduled, of_local_layers]


def dense_masks(batch: dict[str, np.ndarray], rule: Rule, document_mask: bool) -> np.ndarray:
    """bool [B, L, L]: row b's token i sees its token j."""
    rows, length = batch["loss_mask"].shape
    i = np.arange(length)[:, None]
    j = np.arange(length)[None, :]
    visible = rule(i, j) & (j <= i)
    if not document_mask:
        return np.broadcast_to(visible, (rows, length, length))
    ends, offsets = batch["document_ends"], batch["document_ends_offsets"]
    masks = []
    for row in range(rows):
        row_ends = ends[offsets[row] : offsets[row + 1]]
        document = np.array([np.count_nonzero(row_ends <= token) for token in range(length)])
        masks.append(visible & (document[:, None] == document[None, :]))
    return np.stack(masks)


def _mask_layers(model: Any, options: dict[str, Any]) -> None:
    """Every layer takes, of the two masks that the model is given, the one for its kind."""
    every = options["window_attn_skip_freq"]
    for number, layer in enumerate(model.model.layers, start=1):
        local = options["local_window"] is not None and (every is None or number % every != 0)

        def choose(module: Any, args: Any, kwargs: dict[str, Any], kind: int = int(local)) -> Any:
            return args, kwargs | {"attention_mask": kwargs["attention_mask"][:, kind : kind + 1]}

        layer.self_attn.register_forward_pre_hook(choose, with_kwargs=True)


def _silence_positions(model: Any, every: int | None) -> None:
    """NoPE: every n-th layer turns nothing, cos is 1 and sin is 0."""
    for number, layer in enumerate(model.model.layers, start=1):
        if every is not None and number % every == 0:

            def unturned(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                cos, sin = kwargs["position_embeddings"]
                return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}

            layer.self_attn.register_forward_pre_hook(unturned, with_kwargs=True)


def _set_base(model: Any, table: list[tuple[int, float]], window: int) -> None:
    """The base of the first window in the table that is not smaller, else the configuration's."""
    base = next((base for upto, base in table if window <= upto), model.config.rope_parameters["rope_theta"])
    angles = model.model.rotary_emb.inv_freq
    size = 2 * len(angles)
    angles.copy_(base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size))


def _model(trajectory: Path) -> Any:
    """Load the model by transformers, which stacks the experts' matrices that files name one by one."""
    weights = {name: torch.from_numpy(array) for name, array in load_file(trajectory / "initial.safetensors").items()}
    config = AutoConfig.from_pretrained(trajectory)
    if config.model_type == "gpt_oss":
        weights = _stacked(weights)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        load = partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager", dtype=torch.float32)
        model, info = load(folder, output_loading_info=True)
    sinks = {name for name in weights if name.endswith(".sinks") and name not in model.state_dict()}
    assert set(info["unexpected_keys"]) == sinks
    assert set(info["missing_keys"]) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if sinks:  # attention as in gpt-oss
        ALL_ATTENTION_FUNCTIONS.register("with_sinks", eager_attention_forward)
        model.config._attn_implementation = "with_sinks"
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.sinks = torch.nn.Parameter(weights[f"model.layers.{number}.self_attn.sinks"])
    return model.train()


def _weights(model: Any) -> dict[str, np.ndarray]:
    """The weights by the names of files."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = {name: torch.from_numpy(array) for name, array in load_file(f"{folder}/model.safetensors").items()}
    weights = _unstacked(saved) if model.config.model_type == "gpt_oss" else saved
    return {name: weight.numpy() for name, weight in weights.items()}


def _count_choices(model: Any) -> dict[Any, torch.Tensor]:
    """The tokens of each expert of the routers that have a bias, as passes that train add them up."""
    routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
    counts = {router: torch.zeros(router.num_experts) for router in routers}

    def count(router: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        if torch.is_grad_enabled():
            counts[router] += torch.bincount(output[2].flatten(), minlength=router.num_experts)

    for router in routers:
        router.register_forward_hook(count)
    return counts


def _stacked_name(name: str) -> str:
    """The tensor of gpt-oss that holds an expert's matrix or bias; other names are unchanged."""
    layer, marker, expert_name = name.partition(".mlp.experts.")
    if not marker:
        return name
    _, matrix, kind = expert_name.split(".")
    stacked_name = "down_proj" if matrix == "down_proj" else "gate_up_proj"
    return f"{layer}{marker}{stacked_name}" + ("_bias" if kind == "bias" else "")


def _stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights as gpt-oss holds them: matrices [experts, inputs, outputs], outputs of gate and up by turns."""
    tensors: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, weight in weights.items():
        if (stacked_name := _stacked_name(name)) == name:
            tensors[name] = weight
        else:
            number, matrix, _ = name.partition(".mlp.experts.")[2].split(".")
            experts.setdefault(stacked_name, {})[int(number), matrix] = weight.movedim(0, -1)
    for stacked_name, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        if "down" in stacked_name:
            matrices = [parts[number, "down_proj"] for number in numbers]
        else:
            pairs = [[parts[number, matrix] for matrix in ("gate_proj", "up_proj")] for number in numbers]
            matrices = [torch.stack(pair, dim=-1).flatten(-2) for pair in pairs]
        tensors[stacked_name] = torch.stack(matrices)
    return tensors


def _unstacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with a name for each expert."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer, marker, stacked_name = name.partition(".mlp.experts.")
        if not marker:
            tensors[name] = weight
            continue
        kind = "bias" if stacked_name.endswith("_bias") else "weight"
        for expert, part in enumerate(weight):
            gate_up = {"gate_proj": part[..., ::2], "up_proj": part[..., 1::2]}
            for matrix, matrix_weight in (gate_up if "gate_up" in stacked_name else {"down_proj": part}).items():
                tensors[f"{layer}{marker}{expert}.{matrix}.{kind}"] = matrix_weight.movedim(-1, 0)
    return tensors


def _optimizer(model: Any, options: dict[str, Any]) -> torch.optim.AdamW:
    parameters = dict(model.named_parameters())
    without = {_stacked_name(name) for name in options["no_decay"]}
    assert without < parameters.keys()
    groups = [
        {"params": [p for n, p in parameters.items() if n not in without], "weight_decay": options["weight_decay"]},
        {"params": [p for n, p in parameters.items() if n in without], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=tuple(options["betas"]), eps=options["eps"])


def _backward(
    model: Any, batch: dict[str, np.ndarray], masks: list[np.ndarray], options: dict[str, Any], *, own_weights: bool
) -> tuple[float, float, np.ndarray, np.ndarray, float]:
    """The mean loss over all trained tokens of the global batch, plain and weighted, and the latter's gradients.

    Returned with the weights and short-context losses [B, L] of its tokens, and the mean over rows of the experts'
    balancing loss, whose gradients are there too.
    """
    plain = 0.0
    weighted = 0.0
    balance = 0.0
    count = int(batch["loss_mask"].sum())
    batch_weights = batch.get("weights", np.ones(batch["loss_mask"].shape, dtype=np.float32))
    token_weights = batch_weights.copy()
    short_losses = np.full(batch_weights.shape, np.nan, dtype=np.float32)
    divisor = float(batch_weights.sum()) if options["weighting"]["loss_denominator"] == "weights" else count
    visible = np.stack(masks, axis=1)
    for number, (tokens, mask, sees) in enumerate(zip(batch["tokens"], batch["loss_mask"], visible, strict=True)):
        row, trained = torch.from_numpy(tokens), torch.from_numpy(mask)
        losses, partition, routers = _losses(model, row, sees)
        sigmoid = model.config.model_type in ("dots1", "deepseek_v3")
        uneven = torch.zeros(())
        if routers:
            uneven = _balance(routers, model.config.num_experts_per_tok, sigmoid=sigmoid) / len(batch_weights)
        weights = torch.from_numpy(batch_weights[number]).to(losses.dtype)
        if own_weights:
            weights, short = _dense_weights(model, row, trained, sees, losses.detach(), options["weighting"])
            token_weights[number] = (weights * trained).numpy()
            short_losses[number] = short.numpy()
        share = (weights * losses + options["z_loss"] * partition**2)[trained].sum() / divisor
        (share + options["moe_aux_loss_coeff"] * uneven).backward()
        balance += uneven.item()
        plain = plain + losses[trained].sum().item() / count
        weighted = weighted + share.item()
    return plain, weighted, token_weights, short_losses, balance


def _balance(routers: Sequence[torch.Tensor], choices: int, *, sigmoid: bool) -> torch.Tensor:
    """The sum over layers of experts * sum over experts of (share of all choices) * (mean probability), of one row.

    Of sigmoid routers these are the choices without bias and groups, and scores instead of probabilities.
    """
    total = torch.zeros(())
    for logits in routers:
        scores = logits.sigmoid() if sigmoid else logits.softmax(dim=1)
        probabilities = scores / scores.sum(dim=1, keepdim=True)
        chosen = torch.zeros(logits.shape[1], dtype=logits.dtype)
        for token in logits.detach():
            chosen[token.argsort(descending=True)[:choices]] += 1 / (choices * len(logits))
        total = total + logits.shape[1] * (chosen * probabilities.mean(dim=0)).sum()
    return total


def _losses(
    model: Any, row: torch.Tensor, sees: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]:
    """-log p of the tokens after the first, the log partition of their logits, and each layer's of its router."""
    additive = torch.zeros(sees.shape, dtype=model.dtype)
    additive.masked_fill_(~torch.tensor(sees), torch.finfo(model.dtype).min)
    positions = torch.arange(len(row) - 1)[None]
    routed = {"output_router_logits": True} if hasattr(model.config, "num_experts_per_tok") else {}
    # transformers would make its own balancing loss of a mask for whole rows
    outputs = model.model(input_ids=row[None, :-1], attention_mask=additive[None], position_ids=positions, **routed)
    logits = model.lm_head(outputs.last_hidden_state)[0]
    routers = outputs.router_logits if routed else ()
    return torch.nn.functional.cross_entropy(logits, row[1:], reduction="none"), logits.logsumexp(dim=1), routers


@torch.no_grad()
def _dense_weights(
    model: Any, row: torch.Tensor, trained: torch.Tensor, sees: np.ndarray, long: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a row's tokens, and their losses in the short context, NaN where it is the long one."""
    assert (options["token_weighting"], options["loss_denominator"]) == ("unfrozen", "tokens")
    assert (options["weight_score"], options["weight_post"]) == ("abs", "dense")
    n = options["short_context"]
    s = options["short_stride"] or n * 3 // 4
    scores = torch.zeros(len(long), dtype=torch.float64)
    length = len(long)
    short_losses = torch.full_like(long, torch.nan)
    for start in range(s, length - n + s, s):
        end = min(start + n, length)
        short, _, _ = _losses(model, row[start : end + 1], sees[:, start:end, start:end])
        for token in range(start + n - s, end):
            if sees[:, token, :start].any():  # else both contexts are the same
                scores[token] = abs(short[token - start].double() - long[token].double())
                short_losses[token] = short[token - start]
    scores[~trained] = 0
    if not scores.any():
        return torch.ones_like(long), short_losses
    strength = options["strength"]
    return (strength + (1 - strength) * int(trained.sum()) * scores / scores.sum()).to(long.dtype), short_losses
