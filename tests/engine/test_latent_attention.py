"""Latent attention in float64: on several processes against one, which parity/test_oracle.py has repeated."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import build_module
from torch import Tensor

from megatron_ext import rope
from megatron_ext.batch import pack
from megatron_ext.config import ParallelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.context_parallel.choice import CPOptions
from megatron_ext.context_parallel.exchange import Scheme
from megatron_ext.data.row import TokenRow
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.blocks import layer_specs
from megatron_ext.engine.model import PackedAttention, PackedCall
from megatron_ext.engine.transformer import transformer_config
from megatron_ext.masks import MaskOptions
from tests.conftest import slow_but
from tests.launcher import call
from tests.one_process import one_process

T = 24
D = 20
N = 6
LATENT = 10
QUERY_LATENT = 14
PLAIN = 8
ROTATED = 4
VALUE = 6
ENDS = [5, 17, 24]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """Tensor- and context-parallel sizes, and how the attention is computed."""

    tp: int = 1
    sp: bool = False
    cp: int = 1
    query_latent: bool = True
    scheme: Scheme = Scheme.EXCHANGE
    latent: bool = True
    recompute: bool = False


def drawn(name: str, *shape: int) -> Tensor:
    """Draw a whole tensor, the same on every process."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5


def build(layout: Layout) -> Any:
    """Build this process's part of the module, with weights drawn by name."""
    flags = f"--num-layers 1 --hidden-size {D} --num-attention-heads {N} --num-query-groups {N} --v-head-dim {VALUE}"
    flags += f" --multi-latent-attention --kv-lora-rank {LATENT} --qk-head-dim {PLAIN} --qk-pos-emb-head-dim {ROTATED}"
    flags += f" --tensor-model-parallel-size {layout.tp}" + f" --q-lora-rank {QUERY_LATENT}" * layout.query_latent
    flags += " --sequence-parallel" * layout.sp + " --recompute-granularity selective" * layout.recompute
    config = parse(flags.split())
    transformer = transformer_config(config, platform.Platform(CPU, "gloo", transformer_engine=False))
    transformer.params_dtype = torch.float64
    (spec,) = layer_specs(transformer, PackedAttention, None, transformer_engine=False).layer_specs
    attention = build_module(spec, config=transformer, layer_number=1).self_attention
    for name, weight in attention.named_parameters():
        axis = getattr(weight, "partition_dim", -1) if getattr(weight, "tensor_model_parallel", False) else -1
        shape = [size * (layout.tp if n == axis else 1) for n, size in enumerate(weight.shape)]
        whole = drawn(name, *shape) + (1.0 if "norm" in name else 0.0)
        weight.data = whole if axis < 0 else whole.chunk(layout.tp, axis)[dist.get_rank() % layout.tp]
    attention.exchanges_latent = layout.latent
    return attention


def of_rank(rank: int, layouts: list[Layout]) -> list[dict[str, Any]]:
    """Return for each layout this rank's tokens, outputs and gradients, all its tokens' and summed, and bytes sent."""
    first = layouts[0]
    cpu = platform.choose("cpu")
    sizes = ParallelConfig(tensor_model_parallel_size=first.tp, context_parallel_size=first.cp)
    ranks = parallel.start(sizes, 1, cpu, seed=1)
    results = []
    for layout in layouts:
        attention = build(layout)
        group = parallel.context_group(sizes, ranks, cpu)
        context = CPOptions(group, "auto", layout.scheme, N, N) if layout.cp > 1 else None
        row = TokenRow(np.arange(T + 1), np.array(ENDS), np.ones(T, dtype=np.bool_))
        batch = pack([row], T, MaskOptions(document_mask=True), context)
        tokens = batch.tokens_t
        local = tokens.chunk(layout.tp)[ranks.tensor] if layout.sp else tokens
        x = drawn("hidden", T, 1, D)[local].requires_grad_()
        angles = rope.angles(batch.positions_t, rope.inverse_frequencies(ROTATED, 100.0)).double()[:, None, None, :]
        out, bias = attention(x, rotary_pos_emb=angles, packed_seq_params=PackedCall(batch))
        assert bias is None
        out.backward(drawn("gradient", T, 1, D)[local])
        gradients = {"hidden": x.grad}
        for name, weight in attention.named_parameters():
            gradients[name] = weight.grad
            if getattr(weight, "sequence_parallel", False):
                dist.all_reduce(weight.grad, group=ranks.tensor_group)
            if layout.cp > 1:
                dist.all_reduce(weight.grad, group=ranks.context_group)
        results.append({"tokens": local, "out": out.detach(), **gradients, "bytes": group.take_sent_bytes()})
    return results


def check(alone: dict[str, Any], computed: dict[str, Any], layout: Layout, tensor_rank: int) -> None:
    """Compare a rank with one process: its tokens, and its part of the weights."""
    for name, want in alone.items():
        if name in ("tokens", "bytes"):
            continue
        actual = computed[name]
        if name in ("out", "hidden"):
            want = want[computed["tokens"]]
        for axis in range(want.dim()):
            if want.shape[axis] != actual.shape[axis]:
                want = want.chunk(layout.tp, axis)[tensor_rank]
        assert want.abs().max() > 1e-3, name
        torch.testing.assert_close(actual, want, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n} of {layout}: {m}")


QUICK = [Layout(), Layout(cp=3), Layout(tp=2), Layout(tp=2, sp=True)]


@pytest.mark.parametrize("layout", slow_but(QUICK, [*QUICK, Layout(cp=2), Layout(tp=2, sp=True, cp=2)]))
def test_processes_compute_what_one_does(layout: Layout) -> None:
    """The latent or full heads are exchanged, with their bytes counted, or heads are traded for tokens."""
    layouts = [layout, replace(layout, latent=False), replace(layout, recompute=True, query_latent=False)]
    if layout.cp > 1 and N % (layout.tp * layout.cp) == 0:
        layouts.append(replace(layout, scheme=Scheme.ULYSSES))
    with one_process():
        alone = dict(zip((True, False), of_rank(0, [Layout(), Layout(query_latent=False)]), strict=True))
    ranks = call(of_rank, layout.tp * layout.cp, layouts, group=False)
    for rank, results in enumerate(ranks):
        for variant, result in zip(layouts, results, strict=True):
            check(alone[variant.query_latent], result, variant, rank % layout.tp)
    latent, full = (sum(results[n]["bytes"] for results in ranks) for n in (0, 1))
    assert latent * N // layout.tp * (PLAIN + ROTATED + VALUE) == full * (LATENT + ROTATED)
    assert (latent > 0) == (layout.cp > 1)
