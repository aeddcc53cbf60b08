"""The memory estimate against the rehearsed peak, layout by layout: two layers of a 1B model, and of other blocks."""

from importlib.util import find_spec

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import check
from megatron_ext.planning.memory import stage_memory
from megatron_ext.rehearsal.process import Request
from tests.conftest import slow_but
from tests.planning.ranks import fullest_rank, fullest_stage
from tests.rehearsal.server import in_child

SHAPE = (
    "--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 32 --num-query-groups 4 --num-layers 2 "
    "--vocab-size 32000 --seq-length 8192 --loss-block-tokens 1024 --bf16 --data-path nowhere --train-iters 10"
)
STATIC = ("weights", "gradients", "optimizer")
PHI = "--block phi --num-query-groups 32 --rotary-percent 0.5 --ffn-hidden-size 8192"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
CONTEXT = "--context-parallel-size 4 --cp-scheme"
AGAIN = "--recompute-granularity selective --recompute-modules"
UNEVEN = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
ON_HOST = "--recompute-granularity full --offload-layer-inputs"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
OFFLOAD = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction"
EXPERTS = "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 0.01"
EP2 = f"{EXPERTS} --expert-model-parallel-size 2"
SHARED = f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
SHARED += " --moe-shared-expert-intermediate-size 1536"
LATENT = "--multi-latent-attention --num-attention-heads 16 --num-query-groups 16 --attention-backend torch_varlen"
QUICK = "experts of 2"
LAYOUTS = {  # flags, processes, micro-batches
    "interleaved": ("--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2, 4),
    "exchange": (f"{CONTEXT} exchange", 4, 1),
    "experts of 2": (EP2, 2, 2),
    "all modules again": (f"{AGAIN} core_attn layernorm mlp", 1, 2),
    "alone": ("", 1, 2),
    "pipeline of 2": ("--pipeline-model-parallel-size 2", 2, 4),
    "tensor, sequence": (TENSOR, 2, 1),
    "ulysses": (f"{CONTEXT} ulysses", 4, 1),
    "ulysses, copies of key heads": (f"{CONTEXT} ulysses --num-query-groups 1", 4, 1),
    "full": ("--recompute-granularity full", 1, 2),
    "core_attn": (f"{AGAIN} core_attn", 1, 2),
    "layernorm": (f"{AGAIN} layernorm", 1, 3),
    "mlp": (f"{AGAIN} mlp", 1, 2),
    "mlp in blocks": ("--mlp-block-tokens 1024", 1, 2),
    "mlp in blocks, sequence": (f"--mlp-block-tokens 1024 {AGAIN} layernorm {TENSOR}", 2, 2),
    "inputs on the host": (f"--num-layers 6 {ON_HOST}", 1, 2),
    "stages of 3 and 1": (f"--num-layers 4 {UNEVEN} Ettt|tL", 2, 4),
    "recompute block": (f"--num-layers 4 {BLOCK} 2", 1, 1),
    "recompute block, chunks of 2": (
        f"--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 {BLOCK} 1",
        2,
        4,
    ),
    "chunks of 1 and 3, recompute block": (
        f"--num-layers 8 {UNEVEN} Et|t*3|t*3|tL {BLOCK} 2",
        2,
        4,
    ),
    "inputs on the host, uneven": (f"--num-layers 12 {UNEVEN} Et*3|t*5|t*4|L {ON_HOST}", 2, 4),
    "uneven stages with and without experts": (
        f"{SHARED} --num-layers 5 --moe-layer-freq 0 0 1 1 1 {UNEVEN} E|tt|tt|tL",
        2,
        4,
    ),
    "inputs on the host, interleaved": (
        f"--num-layers 16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 {ON_HOST}",
        2,
        4,
    ),
    "no angles": ("--no-rope-freq 1", 1, 1),
    "no angles, as many key heads": ("--no-rope-freq 1 --num-query-groups 32", 1, 1),
    "Phi": (PHI, 1, 1),
    "Gemma 3": ("--block gemma3", 1, 1),
    "attention sinks": ("--softmax-type learnable", 1, 1),
    "gpt-oss": (f"--block gpt_oss {EXPERTS}", 1, 1),
    "latent attention, of queries too, core_attn": (f"{LATENT} --q-lora-rank 1024 {AGAIN} core_attn", 1, 2),
    "latent attention, tensor, sequence": (f"{LATENT} {TENSOR}", 2, 1),
    "latent attention, exchange": (f"{LATENT} {CONTEXT} exchange", 4, 1),
    "latent attention, tensor of 8, exchange of keys": (
        f"{LATENT} --tensor-model-parallel-size 8 --context-parallel-size 2 --cp-scheme exchange --kv-lora-rank 1024",
        16,
        1,
    ),
    "latent attention, ulysses": (f"{LATENT} {CONTEXT} ulysses", 4, 1),
    "Olmo 3": ("--block olmo3", 1, 1),
    "Olmo 3, tensor, sequence": (f"--block olmo3 --num-query-groups 32 {TENSOR}", 2, 1),
    "experts, pipeline of 2": (f"{EXPERTS} --pipeline-model-parallel-size 2", 2, 4),
    "experts of 2, tensor, sequence": (f"{EP2} {TENSOR}", 4, 1),
    "experts of 16": (f"{EXPERTS} --expert-model-parallel-size 16", 16, 1),
    "shared experts of 2, tensor, sequence": (f"{SHARED} --expert-model-parallel-size 2 {TENSOR}", 4, 1),
    "shared experts, mlp": (f"{SHARED} {AGAIN} mlp", 1, 2),
    "a layer without experts": (f"{SHARED} --moe-layer-freq 0 1", 1, 2),
    "a stage without experts": (
        f"{SHARED} --num-layers 4 --moe-layer-freq 0 0 1 1 --pipeline-model-parallel-size 2",
        2,
        4,
    ),
    "offloaded": (f"{OFFLOAD} 1", 2, 1),
}


def agree(flags: str, processes: int, microbatches: int) -> None:
    """All bytes within 5 %, and of those that do not stay between steps."""
    argv = [*SHAPE.split(), *flags.split()]
    config = parse(argv)
    argv += ["--global-batch-size", str(microbatches * config.data_parallel_size(processes))]
    config = parse(argv)
    check(config, processes)
    rank = fullest_rank(config, processes, 32000)
    rehearsal = in_child(Request(argv, processes, rank, [8192], "whole"))
    assert rehearsal["fault"] is None, rehearsal["fault"]["traceback"]
    (step,) = rehearsal["steps"]
    assert step["fault"] is None, step["fault"]["traceback"]
    parts = step["memory"]
    memory = stage_memory(config, processes, 32000, fullest_stage(config, processes, 32000))
    rehearsed = sum(parts.values())
    static = sum(parts[part] for part in STATIC)
    planned_static = memory.weights + memory.gradients + memory.optimizer
    assert memory.total == pytest.approx(rehearsed, rel=0.05), parts
    assert memory.total - planned_static == pytest.approx(rehearsed - static, rel=0.05), parts
    if not config.optimizer.optimizer_cpu_offload:  # whose pinned memory the planner does not count
        assert step["pinned"] == pytest.approx(memory.host, rel=0.1, abs=2**20)
    assert step["cycles"] == 0


@pytest.mark.parametrize("name", slow_but([QUICK], LAYOUTS))
def test_a_layout(name: str) -> None:
    agree(*LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="Muon needs emerging-optimizers")
@pytest.mark.parametrize("flags", [TENSOR, f"{EP2} {TENSOR}"], ids=["tensor, sequence", "experts of 2"])
def test_muon(flags: str) -> None:
    agree(f"--optimizer muon {flags}", 4, 1)
