"""Every mistake: one line that names field and values, the nearest accepted neighbour, and no Megatron needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.validation import check, mistakes
from megatron_ext.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
BASE = "--data-path x --vocab-size 64"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
SEQUENCE = "--sequence-parallel --tensor-model-parallel-size 2"
UNFROZEN = "--token-weighting unfrozen"
FROZEN = "--token-weighting frozen --score-store s"
SHORT = f"{UNFROZEN} --short-context 128"
FOCAL = f"{UNFROZEN} --weight-score focal"
MOE = "--num-experts 4"
FP8 = "--bf16 --fp8-format hybrid"
AWARE = "--bf16 --use-precision-aware-optimizer"
LOWERED = (
    ("main_grads_dtype", "bf16"),
    ("main_params_dtype", "fp16"),
    ("exp_avg_dtype", "bf16"),
    ("exp_avg_sq_dtype", "fp8"),
)


@dataclass(frozen=True)
class Case:
    """A mistake.

    Attributes:
        bad: flags with the mistake.
        start: how its line begins.
        needs: what its line also says.
        good: the nearest flags that pass.
        world: processes, of the bad and of the good run.
        lines: mistakes in all, where one cannot come alone.
    """

    bad: str
    start: str
    needs: str
    good: str
    world: tuple[int, int] = (1, 1)
    lines: int = 1
    base: str = BASE


CASES = [
    # model
    Case("--hidden-size 130", "hidden_size: got 130", "multiple of num_attention_heads 4", "--hidden-size 136"),
    Case("--hidden-size 130", "hidden_size: got 130", "kv_channels", "--hidden-size 130 --kv-channels 32"),
    Case("--hidden-size 132", "kv_channels: got 33", "even head size", "--hidden-size 136"),
    Case("--kv-channels 31", "kv_channels: got 31", "even head size", "--kv-channels 32"),
    # experts
    Case(
        "--moe-router-topk 3",
        "moe_router_topk: got 3 without num_experts",
        "--num-experts",
        f"{MOE} --moe-router-topk 3",
    ),
    Case(
        "--moe-aux-loss-coeff 0.1",
        "moe_aux_loss_coeff: got 0.1 without",
        "leave it out",
        f"{MOE} --moe-aux-loss-coeff 0.1",
    ),
    Case(
        "--early-stopping-patience 3",
        "early_stopping_patience: got 3 with eval_interval 0",
        "add --eval-interval N",
        "--early-stopping-patience 3 --eval-interval 5",
    ),
    Case("--on-spike skip --spike-window 0", "on_spike: got skip with spike_window 0", "raise it", "--on-spike skip"),
    Case("--moe-grouped-gemm", "moe_grouped_gemm: got True without", "leave it out", f"{MOE} --moe-grouped-gemm"),
    Case(f"{MOE} --moe-router-topk 1", "moe_router_topk: got 1", "2..num_experts 4", f"{MOE} --moe-router-topk 2"),
    Case(f"{MOE} --moe-router-topk 5", "moe_router_topk: got 5", "2..num_experts 4", f"{MOE} --moe-router-topk 4"),
    Case(f"{MOE} --block phi", "num_experts: got 4 with block phi", "needs block llama", MOE),
    Case(
        f"{MOE} --add-qkv-bias", "add_qkv_bias: got True with num_experts 4", "leave one out", f"{MOE} --qk-layernorm"
    ),
    Case(f"{MOE} --no-rope-freq 2", "no_rope_freq: got 2 with num_experts 4", "leave one out", MOE),
    Case(
        f"{MOE} --tensor-model-parallel-size 2",
        "sequence_parallel: got false with num_experts 4",
        "add --sequence-parallel",
        f"{MOE} {SEQUENCE}",
        world=(2, 2),
    ),
    Case(
        f"{MOE} --moe-ffn-hidden-size 33 {SEQUENCE}",
        "moe_ffn_hidden_size: got 33",
        "multiple of tensor_model_parallel_size 2",
        f"{MOE} --moe-ffn-hidden-size 34 {SEQUENCE}",
        world=(2, 2),
    ),
    Case(
        f"{MOE} --expert-model-parallel-size 3",
        "num_experts: got 4",
        "multiple of expert_model_parallel_size 3",
        f"{MOE} --expert-model-parallel-size 2 --global-batch-size 6",
        world=(3, 2),
        base=f"{BASE} --global-batch-size 6",
    ),
    Case(
        f"{MOE} --expert-model-parallel-size 4",
        "expert_model_parallel_size: got 4",
        "divisor of the 2 data- and context-parallel ranks of 2 processes",
        f"{MOE} --expert-model-parallel-size 4 --context-parallel-size 2",
        world=(2, 4),
    ),
    Case(
        f"{MOE} --moe-aux-loss-coeff 0.1 {FROZEN} --loss-denominator weights",
        "loss_denominator: got weights with token_weighting frozen",
        "use tokens",
        f"{MOE} {FROZEN} --loss-denominator weights",
    ),
    Case(f"{MOE} --compile", "compile: got True with num_experts 4", "leave one out", "--compile"),
    Case(f"{MOE} {FP8}", "fp8_format: got hybrid with num_experts 4", "leave one out", f"{MOE} --bf16"),
    Case("--qk-layernorm --add-qkv-bias", "qk_layernorm: got true", "leave one out", "--qk-layernorm"),
    Case("--block phi --qk-layernorm", "qk_layernorm: got True", "--block llama", "--block phi"),
    Case("--block phi --add-qkv-bias", "add_qkv_bias: got True", "--block llama", "--add-qkv-bias"),
    Case("--block phi --no-rope-freq 2", "no_rope_freq: got 2", "--block llama", "--no-rope-freq 2"),
    Case("--rotary-percent 0.5", "rotary_percent: got 0.5", "--block phi", "--block phi --rotary-percent 0.5"),
    Case("--rotary-base-local 9 --local-window 9", "rotary_base_local: got 9", "--block gemma3", "--local-window 9"),
    Case("--query-pre-attn-scalar 9", "query_pre_attn_scalar: got 9", "--block gemma3", "--block gemma3"),
    Case("--block gemma3 --rotary-base-local 9", "rotary_base_local: got 9", "needs local_window", "--block gemma3"),
    Case(
        "--block gemma3 --hidden-size 130 --kv-channels 32",
        "hidden_size: got 130",
        "multiple of num_attention_heads",
        "--block gemma3 --hidden-size 128 --kv-channels 32",
    ),
    Case("--block phi --rotary-percent 1.5", "rotary_percent: got 1.5", "at most 1", "--block phi"),
    Case("--block phi --rotary-percent 0.1", "rotary_percent: got 0.1", "even number", "--block phi"),
    Case(
        "--num-attention-heads 3 --kv-channels 32",
        "num_attention_heads: got 3",
        "needs a multiple of num_query_groups 2",
        "--num-attention-heads 4 --kv-channels 32",
    ),
    Case(
        "--num-attention-heads 3 --num-query-groups 3 --kv-channels 32 --tensor-model-parallel-size 2",
        "num_attention_heads: got 3",
        "needs a multiple of tensor_model_parallel_size 2; lower",
        "--num-attention-heads 4 --num-query-groups 4 --kv-channels 32 --tensor-model-parallel-size 2",
        (2, 2),
        lines=2,
    ),
    Case(
        "--num-query-groups 1 --tensor-model-parallel-size 2",
        "num_query_groups: got 1",
        "needs a multiple of tensor_model_parallel_size 2; lower",
        "--num-query-groups 2 --tensor-model-parallel-size 2",
        (2, 2),
    ),
    Case(
        "--ffn-hidden-size 385 --tensor-model-parallel-size 2",
        "ffn_hidden_size: got 385",
        "needs a multiple of tensor_model_parallel_size 2",
        "--ffn-hidden-size 386 --tensor-model-parallel-size 2",
        (2, 2),
    ),
    Case(
        "--make-vocab-size-divisible-by 1 --tensor-model-parallel-size 2",
        "make_vocab_size_divisible_by: got 1",
        "needs a multiple of tensor_model_parallel_size 2",
        "--make-vocab-size-divisible-by 2 --tensor-model-parallel-size 2",
        (2, 2),
    ),
    Case("--attention-dropout 0.1", "attention_dropout: got 0.1", "needs 0", "--attention-dropout 0"),
    Case("--hidden-dropout 1", "hidden_dropout: got 1.0", "needs 0 <= p < 1", "--hidden-dropout 0.99"),
    Case("--hidden-dropout -0.1", "hidden_dropout: got -0.1", "needs 0 <= p < 1", "--hidden-dropout 0"),
    # rows and ranks
    Case("--sequence-parallel", "sequence_parallel: got true", "--no-sequence-parallel", SEQUENCE, (1, 2)),
    Case("--sequence-parallel", "sequence_parallel: got true", "--no-sequence-parallel", "--no-sequence-parallel"),
    Case(
        "--context-parallel-size 2 --seq-length 511",
        "seq_length: got 511 x micro_batch_size 1",
        "needs a multiple of context_parallel_size 2; change seq_length",
        "--context-parallel-size 2 --seq-length 510",
        (2, 2),
    ),
    Case(
        "--context-parallel-size 2 --cp-scheme ulysses --num-query-groups 1",
        "num_query_groups: got 1",
        "cp_scheme ulysses needs a multiple of tensor_model_parallel_size x context_parallel_size 2",
        "--context-parallel-size 2 --cp-scheme ulysses --num-query-groups 2",
        (2, 2),
    ),
    Case(
        f"{SEQUENCE} --seq-length 511",
        "seq_length: got 511 x micro_batch_size 1",
        "multiple of tensor_model_parallel_size x context_parallel_size 2",
        f"{SEQUENCE} --seq-length 512",
        (2, 2),
    ),
    Case(
        f"{SEQUENCE} --seq-length 511",
        "seq_length: got 511",
        "multiple of tensor_model_parallel_size x context_parallel_size 2",
        f"{SEQUENCE} --seq-length 511 --micro-batch-size 2",
        (2, 2),
    ),
    Case(
        "--tensor-model-parallel-size 2",
        "world size: got 3 processes",
        "needs a multiple of 2",
        "--tensor-model-parallel-size 2",
        (3, 4),
    ),
    Case(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "world size: got 2 processes",
        "needs a multiple of 4",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        (2, 4),
    ),
    Case(
        "--global-batch-size 9 --micro-batch-size 2",
        "global_batch_size: got 9",
        "needs a multiple of micro_batch_size 2 x data-parallel size 1 = 2",
        "--global-batch-size 10 --micro-batch-size 2",
    ),
    Case("", "global_batch_size: got 8", "data-parallel size 3 = 3", "--global-batch-size 9", (3, 3)),
    Case(
        "--overlap-param-gather --overlap-grad-reduce",
        "overlap_param_gather: got true",
        "needs use_distributed_optimizer and overlap_grad_reduce",
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
    ),
    Case(
        "--overlap-param-gather --use-distributed-optimizer",
        "overlap_param_gather: got true",
        "needs use_distributed_optimizer and overlap_grad_reduce",
        "--no-overlap-param-gather --use-distributed-optimizer",
    ),
    # memory and speed
    Case(
        "--recompute-modules mlp layernorm",
        "recompute_modules: got mlp layernorm with recompute_granularity none",
        "add --recompute-granularity selective",
        "--recompute-modules mlp layernorm --recompute-granularity selective",
    ),
    Case(
        "--block phi --recompute-modules mlp layernorm --recompute-granularity selective",
        "recompute_modules: got layernorm with block phi",
        "leave it out",
        "--block phi --recompute-modules mlp --recompute-granularity selective",
    ),
    Case(
        "--recompute-modules mlp --recompute-granularity full",
        "recompute_modules: got mlp with recompute_granularity full",
        "needs selective",
        "--recompute-granularity full",
    ),
    *(
        Case(
            f"--{option} --recompute-granularity {kind}",
            f"{option.replace('-', '_')}: got true with recompute_granularity {kind}",
            "leave one out",
            f"--{option}",
        )
        for option in ("compile", "cpu-offloading")
        for kind in ("full", "selective")
    ),
    Case(
        "--cpu-offloading-num-layers 2",
        "cpu_offloading_num_layers: got 2 without cpu_offloading",
        "add --cpu-offloading",
        "--cpu-offloading-num-layers 2 --cpu-offloading",
    ),
    Case(
        "--cpu-offloading --cpu-offloading-num-layers 4",
        "cpu_offloading_num_layers: got 4",
        "needs less than num_layers 4",
        "--cpu-offloading --cpu-offloading-num-layers 3",
    ),
    Case(
        "--cpu-offloading --num-layers 1",
        "cpu_offloading: got true with num_layers 1",
        "needs at least 2",
        "--cpu-offloading --num-layers 2",
    ),
    Case(
        "--cpu-offloading --pipeline-model-parallel-size 2",
        "cpu_offloading: got true with pipeline_model_parallel_size 2",
        "needs 1",
        "--cpu-offloading",
        (2, 2),
    ),
    Case("--cpu-offloading --compile", "cpu_offloading: got true with compile", "leave one out", "--cpu-offloading"),
    Case(
        "--tp-comm-overlap --bf16",
        "tp_comm_overlap: got true without sequence_parallel",
        "add --sequence-parallel",
        f"--tp-comm-overlap --bf16 {SEQUENCE}",
        (2, 2),
    ),
    Case(
        f"--tp-comm-overlap {SEQUENCE}",
        "tp_comm_overlap: got true without bf16",
        "add --bf16",
        f"--tp-comm-overlap --bf16 {SEQUENCE}",
        (2, 2),
    ),
    Case(
        f"--tp-comm-overlap --bf16 {SEQUENCE} {SHORT}",
        "tp_comm_overlap: got true with token_weighting unfrozen",
        "leave one out",
        f"--tp-comm-overlap --bf16 {SEQUENCE} {FOCAL}",
        (2, 2),
    ),
    Case(
        f"--tp-comm-overlap --bf16 {SEQUENCE} --eval-interval 5 --eval-stride 32 --eval-lengths 512 64",
        "tp_comm_overlap: got true with eval_stride 32",
        "windows of 64 tokens",
        f"--tp-comm-overlap --bf16 {SEQUENCE} --eval-interval 5 --eval-stride 32 --eval-lengths 512",
        (2, 2),
    ),
    Case("--fp8-format hybrid", "fp8_format: got hybrid without bf16", "add --bf16", FP8),
    Case(
        "--bf16 --fp8-format e4m3 --fp8-recipe delayed",
        "fp8_format: got e4m3 with fp8_recipe delayed",
        "use hybrid",
        f"{FP8} --fp8-recipe delayed",
    ),
    Case(
        f"{FP8} --fp8-recipe delayed --recompute-granularity selective --recompute-modules layernorm",
        "recompute_modules: got layernorm with fp8_recipe delayed",
        "use tensorwise",
        f"{FP8} --recompute-granularity selective --recompute-modules layernorm",
    ),
    Case(f"{FP8} --hidden-size 136 --kv-channels 32", "hidden_size: got 136", "a multiple of 16;", "--hidden-size 136"),
    Case(
        f"{FP8} --ffn-hidden-size 376", "ffn_hidden_size: got 376", "a multiple of 16;", f"{FP8} --ffn-hidden-size 368"
    ),
    Case(
        f"{FP8} --ffn-hidden-size 368 --tensor-model-parallel-size 2",
        "ffn_hidden_size: got 368",
        "a multiple of 16 on each of 2 ranks",
        f"{FP8} --ffn-hidden-size 384 --tensor-model-parallel-size 2",
        (2, 2),
    ),
    Case(
        f"{FP8} --kv-channels 8 --num-attention-heads 8 --num-query-groups 1",
        "num_query_groups: got 1 heads of 8",
        "a multiple of 16;",
        f"{FP8} --kv-channels 8 --num-attention-heads 8 --num-query-groups 2",
    ),
    Case(
        f"{FP8} --kv-channels 8 --num-attention-heads 3 --num-query-groups 1",
        "num_attention_heads: got 3 heads of 8",
        "a multiple of 16;",
        f"{FP8} --kv-channels 16 --num-attention-heads 3 --num-query-groups 1",
        lines=2,
    ),
    Case(
        f"{FP8} --seq-length 200",
        "seq_length: got 200 x micro_batch_size 1",
        "a multiple of 16;",
        f"{FP8} --seq-length 208",
    ),
    Case(
        f"{FP8} --fp8-recipe mxfp8 --seq-length 208",
        "seq_length: got 208 x micro_batch_size 1",
        "fp8_recipe mxfp8 needs a multiple of 32;",
        f"{FP8} --fp8-recipe mxfp8 --seq-length 224",
    ),
    Case(
        f"{FP8} --seq-length 208 --context-parallel-size 2",
        "seq_length: got 208 x micro_batch_size 1",
        "a multiple of 16 on each of 2 ranks",
        f"{FP8} --seq-length 224 --context-parallel-size 2",
        (2, 2),
    ),
    Case(
        "--optimizer-cpu-offload --bf16",
        "optimizer_cpu_offload: got true without use_precision_aware_optimizer",
        "add --use-precision-aware-optimizer",
        f"--optimizer-cpu-offload {AWARE}",
    ),
    Case(
        f"{AWARE} --optimizer-cpu-offload --optimizer-offload-fraction 1.1",
        "optimizer_offload_fraction: got 1.1",
        "at most 1",
        f"{AWARE} --optimizer-cpu-offload --optimizer-offload-fraction 1",
    ),
    Case(
        "--optimizer-offload-fraction 0.5",
        "optimizer_offload_fraction: got 0.5 without optimizer_cpu_offload",
        "add --optimizer-cpu-offload",
        f"{AWARE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
    *(
        Case(
            f"--bf16 --{name.replace('_', '-')} {kind}",
            f"{name}: got {kind} without use_precision_aware_optimizer",
            "needs fp32",
            f"{AWARE} --{name.replace('_', '-')} {kind}",
        )
        for name, kind in LOWERED
    ),
    *(
        Case(
            f"{AWARE} --optimizer-cpu-offload --{name.replace('_', '-')} {kind}",
            f"{name}: got {kind} with optimizer_cpu_offload",
            "leave it out",
            f"{AWARE} --optimizer-cpu-offload --main-grads-dtype bf16",
        )
        for name, kind in LOWERED[1:]
    ),
    Case(
        "--use-precision-aware-optimizer",
        "use_precision_aware_optimizer: got true without bf16",
        "add --bf16",
        AWARE,
    ),
    Case(
        f"{AWARE} --no-use-distributed-optimizer",
        "use_distributed_optimizer: got false with use_precision_aware_optimizer",
        "leave --no-use-distributed-optimizer out",
        AWARE,
    ),
    # pipeline
    Case(
        "--num-layers 3 --pipeline-model-parallel-size 2",
        "num_layers: got 3",
        "needs a multiple of pipeline_model_parallel_size 2",
        "--num-layers 4 --pipeline-model-parallel-size 2",
        (2, 2),
    ),
    Case(
        "--num-layers-per-virtual-pipeline-stage 1",
        "num_layers_per_virtual_pipeline_stage: got 1 with pipeline_model_parallel_size 1",
        "needs at least 2",
        f"{VIRTUAL} 1",
        (1, 2),
    ),
    Case(f"{VIRTUAL} 2", "num_layers_per_virtual_pipeline_stage: got 2", "proper divisor", f"{VIRTUAL} 1", (2, 2)),
    Case(
        f"{VIRTUAL} 3 --num-layers 8",
        "num_layers_per_virtual_pipeline_stage: got 3",
        "needs a proper divisor of the 4 layers of a stage",
        f"{VIRTUAL} 2 --num-layers 8",
        (2, 2),
    ),
    Case(
        f"{VIRTUAL} 1 --global-batch-size 7",
        "global_batch_size: got 7 micro-batches per step",
        "needs a multiple of pipeline_model_parallel_size 2",
        f"{VIRTUAL} 1 --global-batch-size 8",
        (2, 2),
    ),
    Case(
        "--recompute-granularity full --recompute-num-layers 5",
        "recompute_num_layers: got 5",
        "needs at most the 4 layers",
        "--recompute-granularity full --recompute-num-layers 4",
    ),
    Case(
        f"--recompute-granularity full --recompute-num-layers 2 {VIRTUAL} 1",
        "recompute_num_layers: got 2",
        "needs at most the 1 layers",
        f"--recompute-granularity full --recompute-num-layers 1 {VIRTUAL} 1",
        (2, 2),
    ),
    # window: the schedule's own refusals
    Case("--window-end 513", "window_end: got 513", "needs at most seq_length 512", "--window-end 512"),
    Case("--window-end 0", "window_end: got '0'", "needs more than 0", "--window-end 1"),
    Case("--window-start 513 --window-schedule linear", "window_start: got 513", "needs 1..512", "--window-start 513"),
    Case(
        "--window-rate 0 --window-schedule linear",
        "window_rate: got 0",
        "needs a finite number > 0",
        "--window-rate 0.001 --window-schedule linear",
    ),
    Case("--window-expansion-fraction 1.1", "window_expansion_fraction: got 1.1", "(0, 1]", "--window-end 64"),
    Case("--window-round-to 0", "window_round_to: got 0", "needs >= 1", "--window-round-to 1"),
    Case("--window-cycles 0.3", "window_cycles: got 0.3", "needs 1, 2, ...", "--window-cycles 0.5"),
    Case(
        "--window-schedule continual",
        "window_switch_step: got None",
        "needs a step >= 0",
        "--window-schedule continual --window-switch-step 0",
    ),
    Case(
        "--window-rate 1 --window-expansion-fraction 0.5",
        "window_rate: got 1.0 beside window_expansion_fraction 0.5",
        "give only one",
        "--window-expansion-fraction 0.5",
    ),
    # local layers
    Case(
        "--window-attn-skip-freq 2",
        "window_attn_skip_freq: got 2 without local_window",
        "--local-window",
        "--window-attn-skip-freq 2 --local-window 64",
    ),
    Case(
        "--local-window-fixed",
        "local_window_fixed: got true",
        "add --local-window",
        "--local-window-fixed --local-window 64",
    ),
    Case(
        "--local-window 64 --window-attn-skip-freq 1",
        "window_attn_skip_freq: got 1",
        "2..num_layers 4",
        "--local-window 64 --window-attn-skip-freq 2",
    ),
    Case(
        "--local-window 64 --window-attn-skip-freq 5",
        "window_attn_skip_freq: got 5",
        "leave it out if all are local",
        "--local-window 64 --window-attn-skip-freq 4",
    ),
    Case(
        "--local-window 64 --local-window-fixed --window-schedule linear",
        "window_schedule: got linear",
        "--window-attn-skip-freq N",
        "--local-window 64 --window-schedule linear --window-attn-skip-freq 2",
    ),
    Case(
        "--token-weighting dataset --packing best_fit",
        "packing: got best_fit",
        "needs random",
        "--token-weighting dataset",
    ),
    # weights: who needs what
    Case(
        "--packing decomposition",
        "packing: got decomposition",
        "add --document-mask",
        "--packing decomposition --document-mask",
    ),
    Case("--score-store s", "score_store: got s with token_weighting none", "--token-weighting frozen", FROZEN),
    Case(
        "--token-weighting dataset --score-store s",
        "score_store: got s with token_weighting dataset",
        "leave it out",
        "--token-weighting dataset",
    ),
    Case(
        "--short-context 9", "short_context: got 9 with token_weighting none", UNFROZEN, f"{UNFROZEN} --short-context 9"
    ),
    Case(
        "--token-weighting dataset --short-context 9",
        "short_context: got 9 with token_weighting dataset",
        "leave it out",
        "--token-weighting dataset",
    ),
    Case(f"{FROZEN} --weight-score focal", "weight_score: got focal", "needs no other model; use", FOCAL),
    Case(
        f"{FROZEN} --weight-score mile",
        "weight_score: got mile",
        "use --token-weighting unfrozen",
        f"{UNFROZEN} --weight-score mile",
    ),
    Case(
        "--token-weighting frozen",
        "score_store: got nothing",
        "needs one; make it with python tools/score_tokens.py",
        FROZEN,
    ),
    Case(f"{FROZEN} --short-context 9", "short_context: got 9 with token_weighting frozen", "leave it out", FROZEN),
    Case(
        f"{SHORT} --score-store s", "score_store: got s with token_weighting unfrozen", "needs none; use frozen", SHORT
    ),
    Case(
        f"{SHORT} --weight-score rho1 --weight-post sparse",
        "weight_score: got rho1",
        "needs a reference model; use --token-weighting frozen",
        f"{FROZEN} --weight-score rho1 --weight-post sparse",
    ),
    # weights: the short context
    Case(f"{FOCAL} --short-context 9", "short_context: got 9, weight_score focal", "needs none; leave it out", FOCAL),
    Case(f"{FOCAL} --score-interval 2", "score_interval: got 2", "needs none", f"{FOCAL} --score-interval 1"),
    Case(f"{FOCAL} --score-row-share 0.5", "score_row_share: got 0.5", "needs none", f"{FOCAL} --score-row-share 1"),
    Case(UNFROZEN, "short_context: got nothing", "needs n tokens, such as seq_length / 4", SHORT),
    Case(
        f"{UNFROZEN} --short-context 512",
        "short_context: got 512",
        "needs less than seq_length 512",
        f"{UNFROZEN} --short-context 511",
    ),
    Case(
        f"{SHORT} --short-stride 129",
        "short_stride: got 129",
        "at most short_context 128",
        f"{SHORT} --short-stride 128",
    ),
    Case(
        f"{SHORT} --score-row-share 1.1", "score_row_share: got 1.1", "needs at most 1", f"{SHORT} --score-row-share 1"
    ),
    # weights: from scores
    Case(
        f"{SHORT} --weight-score longce",
        "weight_post: got dense",
        "weight_score longce needs none",
        f"{SHORT} --weight-score longce --weight-post none",
    ),
    *(
        Case(
            f"{FROZEN} --weight-score rho1 --weight-post {post}",
            f"weight_post: got {post}",
            "weight_score rho1 needs sparse",
            f"{FROZEN} --weight-score rho1 --weight-post sparse",
        )
        for post in ("dense", "none")
    ),
    *(
        Case(
            f"{SHORT} --weight-post {post} --weight-strength {bad}",
            f"weight_strength: got {float(bad)}",
            needs,
            f"{SHORT} --weight-post {post} --weight-strength {good}",
        )
        for post, bad, needs, good in [
            ("dense", "-0.01", "needs 0 <= lambda <= 1", "0"),
            ("dense", "1.01", "needs 0 <= lambda <= 1", "1"),
            ("sparse", "0", "needs 0 < kappa <= 1", "1e-9"),
            ("sparse", "1.01", "needs 0 < kappa <= 1", "1"),
            ("none", "-0.01", "needs gamma >= 0", "0"),
        ]
    ),
    Case(
        f"{SHORT} --weight-shift 2",
        "weight_shift: got 2.0, weight_score abs",
        "needs none; use ppmi or npmi",
        f"{SHORT} --weight-shift 2 --weight-score ppmi",
    ),
    *(
        Case(
            f"{SHORT} --weight-score npmi --weight-shift {bad}",
            f"weight_shift: got {float(bad)}",
            "needs k >= 1",
            f"{SHORT} --weight-score npmi --weight-shift 1",
        )
        for bad in ("0.99",)
    ),
    # optimizer
    Case("--lr 1e-3 --min-lr 2e-3", "min_lr: got 0.002", "needs at most lr 0.001", "--lr 1e-3 --min-lr 1e-3"),
    Case("--lr 1e38", "lr: got 1e+38", "lr / (1 - adam_beta1) needs to be a number of fp32", "--lr 3.4e37"),
    Case("--lr 1e38 --adam-beta1 0.99", "lr: got 1e+38", "at most 3.4e+38; lower it", "--lr 1e38 --adam-beta1 0"),
    Case("--lr-warmup-iters 100", "lr_warmup_iters: got 100", "less than the 100 steps", "--lr-warmup-iters 99"),
    Case(
        "--lr-warmup-iters 50 --lr-decay-iters 50",
        "lr_warmup_iters: got 50",
        "less than the 50 steps",
        "--lr-warmup-iters 50 --lr-decay-iters 51",
    ),
    Case(
        "--lr-warmup-iters 100",
        "lr_warmup_iters: got 100",
        "lower it",
        "--lr-warmup-iters 100 --lr-decay-style constant",
    ),
    Case(
        "--lr-decay-style WSD",
        "lr_wsd_decay_iters: got 0",
        "WSD needs 1..100 steps",
        "--lr-decay-style WSD --lr-wsd-decay-iters 1",
    ),
    Case(
        "--lr-decay-style WSD --lr-wsd-decay-iters 91 --lr-warmup-iters 10",
        "lr_wsd_decay_iters: got 91",
        "WSD needs 1..90 steps",
        "--lr-decay-style WSD --lr-wsd-decay-iters 90 --lr-warmup-iters 10",
    ),
    Case(
        "--qk-clip-threshold 100",
        "qk_clip_threshold: got 100.0, needs scores that are measured",
        "add --attention-health-interval 1",
        "--qk-clip-threshold 100 --attention-health-interval 1",
    ),
    *(
        Case(
            f"--qk-clip-threshold 100 --attention-health-interval 1 {norms}",
            "qk_clip_threshold: got 100.0, needs queries and keys without norms",
            "leave it out",
            f"--attention-health-interval 1 {norms}",
        )
        for norms in ("--qk-layernorm", "--block gemma3")
    ),
    Case(
        f"--qk-clip-threshold 100 --attention-health-interval 1 {AWARE}",
        "qk_clip_threshold: got 100.0, needs master weights outside",
        "leave one out",
        f"--attention-health-interval 1 {AWARE}",
    ),
    Case("--spike-window 1", "spike_window: got 1", "needs 0 (none) or at least 2", "--spike-window 2"),
    Case("--adam-beta1 1", "adam_beta1: got 1.0", "needs 0 <= beta < 1", "--adam-beta1 0"),
    Case("--adam-beta2 -0.1", "adam_beta2: got -0.1", "needs 0 <= beta < 1", "--adam-beta2 0.999"),
    Case(
        "--seq-length 524288 --micro-batch-size 4096 --global-batch-size 4096",
        "micro_batch_size: got 2,147,483,648 tokens",
        "needs at most 2^31 - 1",
        "--seq-length 524288 --micro-batch-size 4095 --global-batch-size 4095",
    ),
    # run
    Case("--save=", "save: got an empty name", "needs a folder", "--save s"),
    Case("--load=", "load: got an empty name", "needs a folder", "--load l"),
    Case("--seed -1", "seed: got -1", "needs 0 <= seed < 2^64", "--seed 0"),
    Case(f"--seed {2**64}", f"seed: got {2**64}", "needs 0 <= seed < 2^64", f"--seed {2**64 - 1}"),
    Case(
        "--first-sample 999999999999201", "first_sample: got a run up to", "lower it", "--first-sample 999999999999200"
    ),
    Case("", "data_path: got nothing", "tools/preprocess_data.py", "--data-path x", base="--vocab-size 64"),
    Case("", "vocab_size: got nothing", "tokenizer_model", "--tokenizer-model t", base="--data-path x"),
    Case("", "vocab_size: got nothing", "needs a number", "--vocab-size 1", base="--data-path x"),
    Case("--save-interval 5", "save_interval: got 5 without save", "add --save", "--save-interval 5 --save s"),
    Case("--load-if-present", "load_if_present: got true without load", "add --load", "--load-if-present --load l"),
    Case("--eval-lengths 64 0", "eval_lengths: got 0", "needs 1..seq_length 512", "--eval-lengths 64 1"),
    Case("--eval-lengths 513", "eval_lengths: got 513", "needs 1..seq_length 512", "--eval-lengths 512"),
]


def found(flags: str, world: int) -> list[str]:
    try:
        return list(mistakes(parse(flags.split()), world))
    except UserError as error:  # of a value that its type excludes
        return str(error).splitlines()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.start + case.bad)
def test_mistakes(case: Case) -> None:
    lines = found(f"{case.base} {case.bad}", case.world[0])
    assert len(lines) == case.lines, lines
    (line,) = [line for line in lines if line.startswith(case.start) and case.needs in line]
    assert "\n" not in line
    assert ": got " in line
    assert any(word in line for word in ("needs", "need", "give only"))
    assert found(f"{case.base} {case.good}", case.world[1]) == []


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        ("--num-layers 0", "num_layers: got '0', needs more than 0"),
        ("--num-layers 10001", "num_layers: got '10001', needs at most 10000"),
        ("--weight-decay=-0.1", "weight_decay: got '-0.1', needs at least 0"),
        ("--lr nan", "lr: got 'nan', needs a finite number"),
        ("--window-cycles inf", "window_cycles: got 'inf', needs a finite number"),
        ("--kv-channels 0", "kv_channels: got '0', needs more than 0"),
    ],
)
def test_values_outside_their_type(flags: str, start: str) -> None:
    (line,) = found(f"{BASE} {flags}", 1)
    assert line.startswith(start)


def test_a_constant_window_does_not_read_its_start() -> None:
    assert found(f"{BASE} --seq-length 16", 1) == []
    assert found(f"{BASE} --seq-length 16 --window-schedule linear", 1) != []


def test_a_configuration_made_in_python_is_checked_too() -> None:
    config = parse(BASE.split())
    (line,) = mistakes(replace(config, model=replace(config.model, num_layers=0)), 1)
    assert line.startswith("num_layers: got 0, needs more than 0")


def test_all_mistakes_are_said_at_once() -> None:
    config = parse(["--adam-beta1", "2", "--window-end", "513", "--num-query-groups", "3"])
    with pytest.raises(UserError) as caught:
        check(config, 3)
    fields = [line.split(":")[0] for line in str(caught.value).splitlines()]
    wanted = ["num_attention_heads", "global_batch_size", "window_end", "adam_beta1", "data_path", "vocab_size"]
    assert fields == wanted
    assert str(caught.value) == "\n".join(mistakes(config, 3))


def test_a_right_configuration_is_no_mistake() -> None:
    check(parse(BASE.split()), 1)


# with pretrain_skyladder's own main(): the lines on stderr, the exit status, and what was imported meanwhile
ALL_CASES = """
import contextlib, io, json, os, sys
from pretrain_skyladder import main
results = []
for argv, world in json.load(sys.stdin):
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        results.append([main(argv), said.getvalue()])
loaded = sorted(name for name in ("megatron", "torch", "transformers") if name in sys.modules)
print(json.dumps({"results": results, "loaded": loaded}))
"""


def test_no_mistake_needs_megatron() -> None:
    runs = [(f"{case.base} {case.bad}".split(), case.world[0]) for case in CASES]
    runs += [(["--num-layer", "3"], 1), (["--num-layers", "x"], 1), (["--config", "/no/such/file"], 1)]
    command = [sys.executable, "-c", ALL_CASES]
    done = subprocess.run(command, input=json.dumps(runs), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "megatron" not in answer["loaded"]
    allowed = [case.lines for case in CASES] + [1] * (len(runs) - len(CASES))
    for (argv, _), (status, said), lines in zip(runs, answer["results"], allowed, strict=True):
        assert (status, said.count("\n"), said[-1:]) == (2, lines, "\n"), (argv, said)


def run_script(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "pretrain_skyladder.py", *flags]
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_script_says_one_line_and_leaves(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("data: {data_path: [x], seq_length: 16}\nmodel: {vocab_size: 64}\n")
    done = run_script("--config", str(bad))
    line = "error: window_start: got 32, needs 1..16 (window_end); lower it or raise window_end\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
