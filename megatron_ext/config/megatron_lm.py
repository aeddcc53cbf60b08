"""What stands here for flags of Megatron-LM's scripts that have another name, or none, here."""

from fnmatch import fnmatchcase

# An equivalent: the flags that it stands for. FLAG=VALUE is the flag with that value alone, * is any text.
EQUIVALENTS = {
    "the default here; leave it out": "swiglu use-rotary-position-embeddings position-embedding-type=rope "
    "no-position-embedding normalization=RMSNorm disable-bias-linear group-query-attention attention-dropout=0 "
    "attention-dropout=0.0 use-flash-attn attention-softmax-in-fp32 accumulate-allreduce-grads-in-fp32 "
    "calculate-per-token-loss moe-router-dtype=fp32 moe-token-dispatcher-type=alltoall lr-wsd-decay-style=linear",
    "not needed; leave it out": "use-mcore-models transformer-impl max-position-embeddings num-workers data-cache-path "
    "no-mmap-bin-files no-create-attention-mask-in-dataloader dataloader-type ckpt-* no-ckpt-* dist-ckpt-* *-fusion "
    "auto-detect-ckpt-format use-persistent-ckpt-worker async-strategy manual-gc* empty-unused-memory-level "
    "exit-signal-handler cross-entropy-fusion-impl no-persist-layer-norm ddp-* reset-position-ids",
    "not supported": "position-embedding-type normalization squared-relu quick-geglu openai-gelu apply-layernorm-1p "
    "attention-dropout mtp-* moe-z-loss-coeff moe-router-pre-softmax moe-expert-capacity-factor moe-pad-* moe-token-* "
    "moe-shared-expert-gate moe-shared-expert-overlap moe-enable-deepep moe-flex-* decoupled-* lr-wsd-decay-style "
    "lr-warmup-init rampup-batch-size step-batch-size-schedule use-megatron-fsdp use-torch-fsdp2 test-data-path spec "
    "pipeline-model-parallel-layout *cuda-graph* profile* inference-* rl-* mamba-* hybrid-*",
    "see metrics.jsonl; leave it out": "log-throughput log-*-in-grad log-*-norm log-*-to-tensorboard tensorboard-*",
    "set WANDB_ENTITY or WANDB_DIR in the environment": "wandb-entity wandb-save-dir", "--bf16": "fp16",
    "--device": "distributed-backend", "--data-path": "train-data-path mock-data", "--config FILE": "yaml-cfg",
    "--document-mask": "reset-attention-mask", "--mixture FILE": "data-args-path per-split-data-args-path",
    "--tokenizer-model FOLDER, with tokenizer.json": "tokenizer-type vocab-file merge-file tiktoken-*",
    "--packing drop_tail --document-mask (docs/sft.md)": "sft sft-*", "--no-muon-split-qkv": "muon-no-split-qkv",
    "the flag with iters for samples; divide by --global-batch-size": "train-samples lr-*-samples",
    "--lr-warmup-iters, this share of --lr-decay-iters": "lr-warmup-fraction", "--rope-scaling": "rope-type",
    "--train-iters, with --lr-decay-iters for the whole schedule": "exit-interval", "--cp-scheme": "cp-comm-type",
    "send a signal (docs/howto/slurm.md)": "exit-duration-in-mins", "--rope-beta-fast": "yarn-beta-fast",
    "--init-from": "finetune no-load-optim no-load-rng pretrained-checkpoint", "--rope-beta-slow": "yarn-beta-slow",
    "--config RUN/config.yaml": "use-checkpoint-args", "--on-non-finite": "no-check-for-nan-in-loss-and-grad",
    "--keep-last 1 --keep-every N": "save-retain-interval", "--tp-comm-overlap": "tp-comm-overlap-* tp-comm-bulk-*",
    "--fp8-recipe, without delayed scaling": "fp8-amax-* fp8-margin fp8-interval fp8-param-gather",
    "--local-window, the first number + 1": "window-size", "--main-grads-dtype bf16": "grad-reduce-in-bf16",
    "--recompute-granularity selective": "recompute-activations", "--rope-scaling-factor": "rotary-scaling-factor",
    "--rope-scaling llama3 --rope-scaling-factor 8 --rope-original-length 8192": "use-rope-scaling",
    "--rope-original-length": "*original-max-position-embeddings", "--rope-mscale-all-dim": "mscale-all-dim",
    "--tensor-model-parallel-size, also for experts": "expert-tensor-parallel-size",
}  # fmt: skip
_BY_FLAG = {f"--{flag}": text for text, flags in EQUIVALENTS.items() for flag in flags.split()}


def equivalent(flag: str, value: str) -> str | None:
    """Return what stands here for a flag of Megatron-LM with this value; None for other flags."""
    exact = _BY_FLAG.get(f"{flag}={value}", _BY_FLAG.get(flag))
    return exact or next((text for pattern, text in _BY_FLAG.items() if fnmatchcase(flag, pattern)), None)
