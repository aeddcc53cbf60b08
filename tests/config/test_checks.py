# ruff: noqa: E501
"""The rules across options: each refuses its mistake in a line that begins with the option, and accepts a neighbour."""

from dataclasses import replace

import pytest

from megatron_ext.config.arguments import parse
from megatron_ext.config.checks import WARNINGS, broken, check, mistakes
from megatron_ext.errors import UserError

BASE = "--data-path x --vocab-size 64"
# flags with a mistake | the option that its line names | the nearest flags that pass | processes of both, if not 1;
# flags of a line of ## come before its rows' flags
CASES = """
--hidden-size 130 | hidden_size | --hidden-size 136
--hidden-size 132 | kv_channels | --hidden-size 136
--moe-router-topk 3 | moe_router_topk | --num-experts 4 --moe-router-topk 3
--early-stopping-patience 3 | early_stopping_patience | --early-stopping-patience 3 --eval-interval 5
--on-spike skip --spike-window 0 | on_spike | --on-spike skip
--softmax-type learnable --bf16 --attention-backend flash_attn | attention_backend | --softmax-type learnable --bf16 --attention-backend te_thd
--qk-layernorm --add-qkv-bias | qk_layernorm | --qk-layernorm
--rotary-percent 0.5 | rotary_percent | --block phi --rotary-percent 0.5
--num-attention-heads 3 --num-query-groups 3 --kv-channels 32 --tensor-model-parallel-size 2 | num_attention_heads | --num-attention-heads 4 --num-query-groups 4 --kv-channels 32 --tensor-model-parallel-size 2 | 2 2
--num-query-groups 1 --tensor-model-parallel-size 2 | num_query_groups | --num-query-groups 2 --tensor-model-parallel-size 2 | 2 2
--ffn-hidden-size 385 --tensor-model-parallel-size 2 | ffn_hidden_size | --ffn-hidden-size 386 --tensor-model-parallel-size 2 | 2 2
--make-vocab-size-divisible-by 1 --tensor-model-parallel-size 2 | make_vocab_size_divisible_by | --make-vocab-size-divisible-by 2 --tensor-model-parallel-size 2 | 2 2
--hidden-dropout 1 | hidden_dropout | --hidden-dropout 0.99
--sequence-parallel | sequence_parallel | --sequence-parallel --tensor-model-parallel-size 2 | 1 2
--context-parallel-size 2 --seq-length 511 | seq_length | --context-parallel-size 2 --seq-length 510 | 2 2
--context-parallel-size 2 --cp-scheme ulysses --num-attention-heads 3 --num-query-groups 1 --kv-channels 32 | num_query_groups | --context-parallel-size 2 --cp-scheme ulysses --num-attention-heads 4 --num-query-groups 1 --kv-channels 32 | 2 2
--context-parallel-size 4 --cp-scheme ulysses --num-attention-heads 12 --num-query-groups 6 --kv-channels 32 | num_query_groups | --context-parallel-size 4 --cp-scheme ulysses --num-attention-heads 12 --num-query-groups 2 --kv-channels 32 | 4 4
--sequence-parallel --tensor-model-parallel-size 2 --seq-length 511 | seq_length | --sequence-parallel --tensor-model-parallel-size 2 --seq-length 512 | 2 2
--tensor-model-parallel-size 2 | world size | --tensor-model-parallel-size 2 | 3 4
--global-batch-size 9 --micro-batch-size 2 | global_batch_size | --global-batch-size 10 --micro-batch-size 2
 | global_batch_size | --global-batch-size 9 | 3 3
--overlap-param-gather --overlap-grad-reduce | overlap_param_gather | --overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer
--data-path 1 a 2 a | data_path, mixture | --data-path 1 a 2 b
--recompute-modules mlp layernorm | recompute_modules | --recompute-modules mlp layernorm --recompute-granularity selective
--compile --recompute-granularity full | compile | --compile
--mlp-block-tokens 64 --recompute-granularity selective --recompute-modules mlp | mlp_block_tokens | --mlp-block-tokens 64 --recompute-granularity selective --recompute-modules layernorm
--offload-layer-inputs --recompute-granularity selective | offload_layer_inputs | --offload-layer-inputs --recompute-granularity full
--offload-layer-inputs --recompute-granularity full --recompute-method block | offload_layer_inputs | --recompute-granularity full --recompute-method block
--mlp-block-tokens 64 --num-experts 4 | num_experts | --mlp-block-tokens 64
--tp-comm-overlap --bf16 | tp_comm_overlap | --tp-comm-overlap --bf16 --sequence-parallel --tensor-model-parallel-size 2 | 2 2
--fp8-format hybrid | fp8_format | --bf16 --fp8-format hybrid
--bf16 --fp8-format hybrid --hidden-size 136 --kv-channels 32 | hidden_size | --hidden-size 136
--optimizer-cpu-offload --bf16 | optimizer_cpu_offload | --optimizer-cpu-offload --bf16 --use-precision-aware-optimizer
--bf16 --main-grads-dtype bf16 | main_grads_dtype | --bf16 --use-precision-aware-optimizer --main-grads-dtype bf16
--use-precision-aware-optimizer | use_precision_aware_optimizer | --bf16 --use-precision-aware-optimizer
--muon-num-ns-steps 6 | muon_num_ns_steps | --optimizer muon --muon-num-ns-steps 6
--optimizer muon --use-distributed-optimizer | use_distributed_optimizer | --optimizer muon --no-use-distributed-optimizer
--optimizer muon --overlap-param-gather --overlap-grad-reduce | overlap_param_gather | --optimizer muon --overlap-grad-reduce
--optimizer muon --bf16 --use-precision-aware-optimizer | use_precision_aware_optimizer | --optimizer muon --bf16
--num-layers 3 --pipeline-model-parallel-size 2 | num_layers | --num-layers 4 --pipeline-model-parallel-size 2 | 2 2
--num-layers-per-virtual-pipeline-stage 1 | num_layers_per_virtual_pipeline_stage | --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 | 1 2
--window-end 513 | window_end | --window-end 512
--window-start 513 --window-schedule linear | window_start | --window-start 513
--window-expansion-fraction 1.1 | window_expansion_fraction | --window-end 64
--window-schedule continual | window_switch_step | --window-schedule continual --window-switch-step 0
--window-attn-skip-freq 2 | window_attn_skip_freq | --window-attn-skip-freq 2 --local-window 64
--token-weighting dataset --packing best_fit | packing | --token-weighting dataset
--packing decomposition | packing | --packing decomposition --document-mask
--weight-shift 0.99 | weight_shift | --weight-shift 1
--token-weighting frozen --score-store s --weight-score focal | weight_score | --token-weighting unfrozen --weight-score focal
--token-weighting frozen | score_store | --token-weighting frozen --score-store s
--token-weighting unfrozen --short-context 128 --weight-score rho1 --weight-post sparse | weight_score | --token-weighting frozen --score-store s --weight-score rho1 --weight-post sparse
--token-weighting unfrozen | short_context | --token-weighting unfrozen --short-context 128
--lr 1e-3 --min-lr 2e-3 | min_lr | --lr 1e-3 --min-lr 1e-3
--lr-warmup-iters 100 | lr_warmup_iters | --lr-warmup-iters 99
--lr-decay-style WSD | lr_wsd_decay_iters | --lr-decay-style WSD --lr-wsd-decay-iters 1
--spike-window 1 | spike_window | --spike-window 2
--num-layers 10001 | num_layers | --num-layers 10000
--weight-decay=-0.1 | weight_decay | --weight-decay 0
--lr nan | lr | --lr 1e-3
--adam-beta1 1 | adam_beta1 | --adam-beta1 0
--seq-length 524288 --micro-batch-size 4096 --global-batch-size 4096 | micro_batch_size | --seq-length 524288 --micro-batch-size 4095 --global-batch-size 4095
--save= | save | --save s
--seed 18446744073709551616 | seed | --seed 18446744073709551615
--vocab-size none | vocab_size | --vocab-size none --tokenizer-model t
--save-interval 5 | save_interval | --save-interval 5 --save s
--eval-lengths 64 513 | eval_lengths | --eval-lengths 64 512
--block gpt_oss | num_experts | --block gpt_oss --num-experts 4
## --num-experts 4
--moe-router-topk 5 | moe_router_topk | --moe-router-topk 4
--moe-router-topk 1 | moe_router_topk | --moe-router-topk 2
--block phi | num_experts |
--block gpt_oss --softmax-type learnable | softmax_type | --softmax-type learnable
--add-qkv-bias | add_qkv_bias | --qk-layernorm
--tensor-model-parallel-size 2 | sequence_parallel | --sequence-parallel --tensor-model-parallel-size 2 | 2 2
--moe-ffn-hidden-size 33 --sequence-parallel --tensor-model-parallel-size 2 | moe_ffn_hidden_size | --moe-ffn-hidden-size 34 --sequence-parallel --tensor-model-parallel-size 2 | 2 2
--block gpt_oss --sequence-parallel --tensor-model-parallel-size 2 | tensor_model_parallel_size | --sequence-parallel --tensor-model-parallel-size 2 | 2 2
--expert-model-parallel-size 4 | expert_model_parallel_size | --expert-model-parallel-size 4 --context-parallel-size 2 | 2 4
--moe-aux-loss-coeff 0.1 --token-weighting frozen --score-store s --loss-denominator weights | loss_denominator | --token-weighting frozen --score-store s --loss-denominator weights
--bf16 --fp8-format hybrid | fp8_format | --bf16
--global-batch-size 6 --expert-model-parallel-size 3 | num_experts | --global-batch-size 6 --expert-model-parallel-size 2 | 3 2
--multi-latent-attention | num_query_groups | --multi-latent-attention --num-query-groups 4
--v-head-dim 64 | v_head_dim | --multi-latent-attention --num-query-groups 4 --v-head-dim 64
--moe-router-num-groups 2 --moe-router-group-topk 1 | moe_router_num_groups | --moe-router-score-function sigmoid --moe-router-num-groups 2 --moe-router-group-topk 1
--moe-layer-freq 0 1 1 | moe_layer_freq | --moe-layer-freq 0 1 1 0
--moe-layer-freq 0 0 0 0 | moe_layer_freq | --moe-layer-freq 0 0 0 1
--block gpt_oss --moe-shared-expert-intermediate-size 32 | moe_shared_expert_intermediate_size | --moe-shared-expert-intermediate-size 32
--moe-shared-expert-intermediate-size 33 --sequence-parallel --tensor-model-parallel-size 2 | moe_shared_expert_intermediate_size | --moe-shared-expert-intermediate-size 34 --sequence-parallel --tensor-model-parallel-size 2 | 2 2
--ffn-hidden-size 385 --moe-ffn-hidden-size 32 --moe-layer-freq 0 1 1 1 --sequence-parallel --tensor-model-parallel-size 2 | ffn_hidden_size | --ffn-hidden-size 385 --moe-ffn-hidden-size 32 --sequence-parallel --tensor-model-parallel-size 2 | 2 2
## --num-experts 8 --moe-router-topk 4 --moe-router-score-function sigmoid
--moe-router-bias-update-rate 0 | moe_router_bias_update_rate | --moe-router-bias-update-rate 0 --moe-router-enable-expert-bias
--moe-router-num-groups 4 | moe_router_num_groups | --moe-router-num-groups 4 --moe-router-group-topk 2
--moe-router-num-groups 8 --moe-router-group-topk 2 | moe_router_num_groups | --moe-router-num-groups 2 --moe-router-group-topk 2
--moe-router-num-groups 4 --moe-router-group-topk 1 | moe_router_group_topk | --moe-router-num-groups 4 --moe-router-group-topk 2
## --multi-latent-attention --num-query-groups 4
--kv-channels 32 | kv_channels | --qk-head-dim 65
--v-head-dim 193 | v_head_dim | --v-head-dim 192
--qk-pos-emb-head-dim 15 | qk_pos_emb_head_dim | --qk-pos-emb-head-dim 16
--block gemma3 | block | --hidden-size 130
--softmax-type learnable | softmax_type | --softmax-type vanilla
--compile | compile | --recompute-granularity full
--local-window 64 | local_window | --kv-lora-rank 64
--rope-mscale-all-dim 1 | rope_mscale_all_dim | --rope-mscale-all-dim 1 --rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 128
## --block phi
--qk-layernorm | qk_layernorm |
--rotary-percent 0.1 | rotary_percent |
--recompute-modules mlp layernorm --recompute-granularity selective | recompute_modules | --recompute-modules mlp --recompute-granularity selective
--bf16 --fp8-format hybrid --recompute-granularity selective --recompute-modules mlp | recompute_modules | --bf16 --fp8-format hybrid --recompute-granularity full
## --block gemma3
--rotary-base-local 9 | rotary_base_local |
--hidden-size 130 --kv-channels 32 | hidden_size | --hidden-size 128 --kv-channels 32
## --tp-comm-overlap --bf16 --sequence-parallel --tensor-model-parallel-size 2
--token-weighting unfrozen --short-context 128 | tp_comm_overlap | --token-weighting unfrozen --weight-score focal | 2 2
--eval-interval 5 --eval-stride 32 --eval-lengths 512 64 | tp_comm_overlap | --eval-interval 5 --eval-stride 32 --eval-lengths 512 | 2 2
## --bf16 --fp8-format hybrid
--recompute-granularity full --offload-layer-inputs | offload_layer_inputs | --recompute-granularity full
--ffn-hidden-size 376 | ffn_hidden_size | --ffn-hidden-size 368
--kv-channels 8 --num-attention-heads 8 --num-query-groups 1 | num_query_groups | --kv-channels 8 --num-attention-heads 8 --num-query-groups 2
--seq-length 200 | seq_length | --seq-length 208
--fp8-recipe mxfp8 --seq-length 208 | seq_length | --fp8-recipe mxfp8 --seq-length 224
--seq-length 208 --context-parallel-size 2 | seq_length | --seq-length 224 --context-parallel-size 2 | 2 2
## --bf16 --fp8-format hybrid --sequence-parallel --tensor-model-parallel-size 2
--seq-length 528 --micro-batch-size 1 | seq_length | --seq-length 544 --micro-batch-size 1 | 2 2
--seq-length 544 --context-parallel-size 2 | seq_length | --seq-length 576 --context-parallel-size 2 | 4 4
--fp8-recipe blockwise --seq-length 640 | seq_length | --fp8-recipe blockwise --seq-length 768 | 2 2
--fp8-recipe blockwise --hidden-size 192 | hidden_size | --fp8-recipe blockwise --hidden-size 256 | 2 2
## --bf16 --use-precision-aware-optimizer
--optimizer-cpu-offload --optimizer-offload-fraction 1.1 | optimizer_offload_fraction | --optimizer-cpu-offload --optimizer-offload-fraction 1
--optimizer-cpu-offload --main-params-dtype fp16 | main_params_dtype | --optimizer-cpu-offload --main-grads-dtype bf16
--no-use-distributed-optimizer | use_distributed_optimizer |
## --pipeline-model-parallel-size 2
--num-layers-per-virtual-pipeline-stage 2 | num_layers_per_virtual_pipeline_stage | --num-layers-per-virtual-pipeline-stage 1 | 2 2
--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 7 | global_batch_size | --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8 | 2 2
## --recompute-granularity full
--recompute-num-layers 5 | recompute_num_layers | --recompute-num-layers 4
--recompute-num-layers 3 | recompute_num_layers | --recompute-num-layers 3 --recompute-method block
--recompute-num-layers 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 | recompute_num_layers | --recompute-num-layers 1 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 | 2 2
## --local-window 64
--window-attn-skip-freq 1 | window_attn_skip_freq | --window-attn-skip-freq 2
--local-window-fixed --window-schedule linear | window_schedule | --window-schedule linear --window-attn-skip-freq 2
## --token-weighting frozen --score-store s
--short-context 9 | short_context |
--weight-score rho1 --weight-post dense | weight_post | --weight-score rho1 --weight-post sparse
## --token-weighting unfrozen --short-context 128
--score-store s | score_store |
--short-stride 129 | short_stride | --short-stride 128
--weight-score longce | weight_post | --weight-score longce --weight-post none
--weight-post dense --weight-strength -0.01 | weight_strength | --weight-post dense --weight-strength 0
--weight-post sparse --weight-strength 0 | weight_strength | --weight-post sparse --weight-strength 1e-9
--weight-shift 2 | weight_shift | --weight-shift 2 --weight-score ppmi
## --token-weighting unfrozen --weight-score exposure --weight-post none
--weight-post dense | weight_post | --loss-denominator weights
--short-context 9 | short_context | --exposure-tau 256
--exposure-tau 257 | exposure_tau | --exposure-alpha 0
--weight-strength 0.5 | weight_strength | --exposure-gamma 0
--weight-clip 2 | weight_clip |
--weight-score focal --exposure-gamma 1 | exposure_gamma | --weight-score focal
## --token-weighting unfrozen
--weight-score focal --short-context 9 | short_context | --weight-score focal
--short-context 512 | short_context | --short-context 511
## --lr-decay-style WSD
--lr-wsd-decay-iters 91 --lr-warmup-iters 10 | lr_wsd_decay_iters | --lr-wsd-decay-iters 90 --lr-warmup-iters 10
## --window-schedule linear
--rope-scaling-factor 4 | rope_scaling_factor |
--rope-scaling linear | rope_scaling_factor | --rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 128
--rope-scaling linear --rope-scaling-factor 2 --rope-original-length 128 | rope_original_length | --rope-scaling linear --rope-scaling-factor 2
--rope-scaling dynamic --rope-original-length 128 --rope-scaling-factor 0.5 | rope_scaling_factor | --rope-scaling dynamic --rope-original-length 128
--rope-scaling dynamic | rope_original_length | --rope-scaling dynamic --rope-original-length 128
--rope-scaling llama3 --rope-scaling-factor 4 --rope-original-length 128 --rope-low-freq-factor 4 | rope_high_freq_factor | --rope-scaling llama3 --rope-scaling-factor 4 --rope-original-length 128
--rope-window-bases 64=9 | rope_window_bases | --rope-window-bases 64:9
--rope-window-bases 64:9 64:8 | rope_window_bases | --rope-window-bases 64:9 65:8
--rope-window-bases 512:9 | rope_window_bases | --rope-window-bases 512:10000
--rope-window-bases 64:9 --rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 128 | rope_window_bases | --rope-window-bases 64:9
--rope-window-bases 64:9 --window-schedule constant | rope_window_bases | --rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 128
## --window-schedule linear --rope-scaling yarn --rope-scaling-factor 4 --rope-original-length 128
--rope-beta-fast 1 | rope_beta_fast |
--rotary-base 1 | rotary_base | --rotary-base 2
--kv-channels 2 | kv_channels | --kv-channels 4
"""


def found(flags: str, world: int = 1) -> list[str]:
    try:
        base = BASE.replace("--data-path x", "") if "--data-path" in flags else BASE
        return list(mistakes(parse(f"{base} {flags}".split()), world))
    except UserError as error:  # of a value that its type excludes
        return str(error).splitlines()


def test_each_rule_refuses_its_mistake_and_accepts_a_neighbour() -> None:
    wrong = []
    common = ""
    for line in CASES.strip("\n").splitlines():
        if line.startswith("## "):
            common = line.removeprefix("## ")
            continue
        bad, option, good, *worlds = (part.strip() for part in line.split("|"))
        before, after = map(int, worlds[0].split()) if worlds else (1, 1)
        lines, passes = found(f"{common} {bad}", before), found(f"{common} {good}", after)
        if not any(line.startswith(f"{option}: got ") for line in lines) or len(lines) > 2 or passes:
            wrong.append((line, lines, passes))
    assert not wrong


def test_what_a_mistake_entails_is_not_reported() -> None:
    """A stage of 2 layers is not interleaved in chunks of 2, so it does not need a multiple of 2 micro-batches."""
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 3"
    (line,) = found(flags, 2)
    assert line.startswith("num_layers_per_virtual_pipeline_stage: got 2")


def test_what_only_training_cannot_do() -> None:
    for flags, processes in (
        ("--num-experts 4 --moe-router-topk 1", 1),
        ("--num-experts 4 --tensor-model-parallel-size 2", 2),
        ("--multi-latent-attention --num-query-groups 4 --v-head-dim 200", 1),
    ):
        config = parse(f"{BASE} {flags}".split())
        assert list(mistakes(config, processes))
        assert not list(mistakes(config, processes, training=False))


def test_a_configuration_made_in_python_is_checked_too() -> None:
    config = parse(BASE.split())
    (line,) = mistakes(replace(config, model=replace(config.model, num_layers=0)), 1)
    assert line.startswith("num_layers: got 0, needs more than 0")
    assert found("--num-layers 0") == [line]


def test_all_mistakes_are_reported_at_once() -> None:
    config = parse(["--min-lr", "2", "--window-end", "513", "--num-query-groups", "3"])
    with pytest.raises(UserError) as caught:
        check(config, 3)
    options = [line.split(":")[0] for line in str(caught.value).splitlines()]
    expected = ["num_attention_heads", "global_batch_size", "window_end", "min_lr", "data_path", "vocab_size"]
    assert options == expected


@pytest.mark.parametrize(
    ("bad", "text", "good"),
    [
        # 105 million tokens; 1,500 steps are 98
        ("--train-iters 1600 --seq-length 1024 --global-batch-size 64", "up to all 1,600 steps", "--save-seconds 9"),
        ("--save none", "save: got nothing, so the weights are lost", "--save there"),
    ],
)
def test_warnings(bad: str, text: str, good: str) -> None:
    flags = f"{BASE} --save s --train-iters 30 {bad}"
    (line,) = broken(WARNINGS, parse(flags.split()))
    assert text in line
    assert list(broken(WARNINGS, parse(f"{flags} {good}".split()))) == []
