"""Estimates what one layer's attention keeps and takes on one rank, by the formulas of docs/planning.md.

Legend: t tokens of this rank, u keys of pieces away, N query heads, G key heads, H head size; tp and cp the tensor- and
context-parallel sizes; e the bytes of a number (bf16: 2). N and G here are those of one tensor-parallel rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.attention.interface import Scheme
from megatron_ext.config import Config
from megatron_ext.planning.attention_shapes import Call, Shapes


@dataclass(frozen=True)
class AttentionSizes:
    """Holds N, G, H, e, and the share of layers that turn their queries and keys."""

    heads: int
    key_heads: int
    head_size: int
    width: int
    turned: float

    @classmethod
    def of(cls, config: Config) -> AttentionSizes:
        """Read them from a configuration."""
        model, tp = config.model, config.parallel.tensor_model_parallel_size
        return cls(
            heads=model.num_attention_heads // tp,
            key_heads=max(model.num_query_groups // tp, 1),
            head_size=model.head_size,
            width=2 if config.training.bf16 else 4,
            turned=sum(map(model.has_rope, range(1, model.num_layers + 1))) / model.num_layers,
        )


def attention_bytes(config: Config, shapes: Shapes) -> int:
    """Return the bytes that one layer's attention keeps between its two projections for the backward pass.

    In numbers per head: N + 2 G of queries, keys and values as computed together, N + G turned, N of output. Beside
    them 4 N of normalisers, and 4 e of cosines and sines for each dimension that is turned. A layer without RoPE
    has `_copied_queries`, no keys turned, no cosines and sines. Attention that is computed again keeps no
    normalisers, nor anything of the exchange. Norms of queries and keys keep what enters them.
    """
    sizes = AttentionSizes.of(config)
    heads, key_heads, size, e = sizes.heads, sizes.key_heads, sizes.head_size, sizes.width
    again = "core_attn" in recomputed_modules(config)
    if shapes.scheme is Scheme.EXCHANGE and not again:
        rows = _exchanged(config, shapes, sizes)
    else:
        fresh = 1 if config.model.has_qk_norms else sizes.turned  # share of layers whose queries and keys are made anew
        apart = fresh * (heads + key_heads) + (1 - fresh) * _copied_queries(sizes)
        rows = shapes.tokens * (heads + 2 * key_heads + apart + heads)
    per_token: float = 0 if again else 4 * heads
    per_token += sizes.turned * 4 * e * config.model.rotary_size
    return math.ceil(e * size * rows + shapes.tokens * (per_token + _head_norms(config, sizes)))


def _exchanged(config: Config, shapes: Shapes, sizes: AttentionSizes) -> float:
    """Return the heads' rows that the exchange keeps.

    The queries turned; where some see this rank's own keys alone, the keys turned and all that the projection gave,
    of which the values are a part, or copies of those at home; the keys and values that others see; and the output
    twice, as computed and put together.
    """
    heads, key_heads, tokens = sizes.heads, sizes.key_heads, shapes.tokens
    rows: float = 0
    views = False  # of all queries turned
    for call, copied in ((shapes.home, shapes.copied_home), (shapes.away, shapes.copied_away)):
        if call is not None:
            rows += call.queries * heads if copied else 0
            views |= not copied
    rows += tokens * heads if views else 0
    if shapes.home is not None:
        own = tokens * (heads + 2 * key_heads + sizes.turned * key_heads)
        rows += 2 * key_heads * shapes.home.queries if shapes.copied_home else own
    if shapes.away is not None:
        rows += 2 * key_heads * shapes.away.keys
    parts = math.gcd(config.parallel.overlap_parts(on_cuda=config.parallel.device != "cpu"), key_heads)
    joined = shapes.away is not None and (shapes.home is not None or parts > 1)
    return rows + tokens * heads * (2 if joined else 1)


def _copied_queries(sizes: AttentionSizes) -> int:
    """Return the heads of queries that are copied out of what the projection gave, key head by key head.

    One key head's queries lie side by side, and so do, an equal distance apart, those that have a key head each.
    """
    return 0 if sizes.key_heads in (1, sizes.heads) else sizes.heads


def _head_norms(config: Config, sizes: AttentionSizes) -> float:
    """Return the bytes per token that norms of queries and keys keep: what enters, and statistics.

    The keys that enter are a part of what the projection gave, the queries a copy. Gemma's norms copy both in fp32.
    """
    if not config.model.has_qk_norms:
        return 0
    both = sizes.heads + sizes.key_heads
    entered = 4 * both if config.model.block == "gemma3" else sizes.width * _copied_queries(sizes)
    return entered * sizes.head_size + 4 * both


def attention_backward(config: Config, shapes: Shapes) -> int:
    """Return the bytes of attention's gradients: of its output, queries, keys and values, and the kernel's scratch.

    Where attention is computed again, its output and normalisers as well.
    """
    sizes = AttentionSizes.of(config)
    heads, key_heads, size, e = sizes.heads, sizes.key_heads, sizes.head_size, sizes.width
    taken = e * shapes.tokens * (2 * heads + 2 * key_heads) * size
    if "core_attn" in recomputed_modules(config):
        taken += shapes.tokens * heads * (e * size + 4)
    shares = config.parallel.context_parallel_size if shapes.scheme is Scheme.ULYSSES else 1
    return taken + max(_scratch(call, sizes, shares) for call in shapes.calls)


def recomputed_modules(config: Config) -> tuple[str, ...]:
    """Return what of each layer is computed again in backward; () where nothing is, or whole layers are."""
    parallel = config.parallel
    return parallel.recomputed_modules if parallel.recompute_granularity == "selective" else ()


def _scratch(call: Call, sizes: AttentionSizes, shares: int) -> int:
    """Return what the backend takes for itself in backward; shares are those of the heads under Ulysses.

    What FlashAttention 4, cuDNN and the reference take is not known here: they count as FlashAttention 2.
    """
    heads, key_heads = sizes.heads // shares, max(sizes.key_heads // shares, 1)
    if call.backend == "triton_packed":
        return packed_backward_scratch(call.queries, heads)
    return flash_backward_scratch(
        call.queries, call.keys, call.segments, heads, key_heads, sizes.head_size, sizes.width
    )


def packed_backward_scratch(tokens: int, heads: int) -> int:
    """Return the bytes that our packed kernels take in their backward pass: a float for each query and head."""
    return 4 * tokens * heads


def flash_backward_scratch(
    tokens: int, keys: int, segments: int, heads: int, key_heads: int, head_size: int, width: int
) -> int:
    """Return the bytes that flash attention 2 takes in its backward pass beside its results.

    fp32 [tokens + 128 segments, heads, head size rounded up to 32] of the queries' gradients before they are rounded,
    as many row sums for each head, and where heads share keys the keys' and values' gradients for each head.

    Args:
        tokens, keys: rows of queries and of keys.
        segments: of the call.
        heads, key_heads, head_size: of this rank.
        width: bytes of a number.
    """
    rows = tokens + 128 * segments
    expanded = 2 * keys * heads * head_size * width if heads != key_heads else 0
    return 4 * rows * heads * (-(-head_size // 32) * 32 + 1) + expanded
