"""`--dump-trajectory`: write all data needed to reproduce a run without this package.

    step_000000.npz ...       tokens int64 [B, L+1], loss_mask bool [B, L], window, and the document ends of row b:
                              document_ends[document_ends_offsets[b] : document_ends_offsets[b + 1]], in 1..L.
                              With token weighting, in the rows' order under any layout: weights float32 [B, L], the
                              factor of each loss (0 for untrained tokens); if the score compares contexts,
                              short_loss float32 [B, L], NaN where both are the same and none was computed
    initial.safetensors       weights before the first step, by Hugging Face names
    final.safetensors         weights after the last
    config.json               the Hugging Face configuration
    optimizer.json            betas, eps, weight_decay, clip_grad (null: never), no_decay (names); rope_window_bases
                              ([window, base]: for windows up to this); and the configuration's options by name

The learning rate of each step is in metrics.jsonl. Every process calls every method; process 0 writes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.checkpoint.hf.folder import save_tensors
from megatron_ext.config import Config
from megatron_ext.config.arguments import to_dict
from megatron_ext.engine.agreement import run_on_rank0
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.weights import gather
from megatron_ext.run.callbacks import Callback, StepRecord
from megatron_ext.run.inputs import Inputs, RowAt
from megatron_ext.token_weighting.exposure import exposure_rows
from megatron_ext.token_weighting.weigher import Weigher

OPTIONS = ("model", "data", "window", "optimizer", "training")  # sections of the configuration in optimizer.json


class Trajectory(Callback):
    """Writes one run's trajectory to `--dump-trajectory`, a folder that is created if missing.

    The initial weights are written here, unless the run resumes after `step` steps and an earlier start wrote them.
    """

    def __init__(
        self, config: Config, chunks: Sequence[PackedGPT], ranks: Ranks, inputs: Inputs, weigher: Weigher, step: int
    ) -> None:
        self.folder = Path(config.checkpoint.dump_trajectory or "")
        self.config, self.chunks, self.ranks, self.inputs, self.weigher = config, chunks, ranks, inputs, weigher
        if not run_on_rank0(self._describe, self.folder) or step == 0:
            self.weights("initial")

    def _describe(self) -> bool:
        """Write config.json; return whether the initial weights are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Models whose local layers have separate angles keep the types of layers; others are written without local
        # layers and layers without angles: optimizer.json records these, like the masks. Attention sinks are among the
        # weights alone.
        plain = self.config.model
        if not plain.traits.local_angles:
            plain = replace(
                plain, local_window=None, window_attn_skip_freq=None, rotary_base_local=None, no_rope_freq=None
            )
        plain = replace(plain, softmax_type="vanilla")
        entries = hugging_face_config(plain, self.inputs.vocab_size, self.config.data.seq_length)
        entries.pop("rope_scaling", None)
        (self.folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
        return (self.folder / "initial.safetensors").is_file()

    def weights(self, name: str) -> None:
        """Write the current weights, as `initial` or `final`."""
        if (full := gather(self.chunks, self.config.model, self.inputs.vocab_size, self.ranks)) is None:
            return
        config, model, options = self.config, self.config.model, self.config.optimizer
        if not model.untie_embeddings_and_output_weights:
            full.pop("lm_head.weight", None)
        save_tensors(full, self.folder / f"{name}.safetensors")
        # an expert bias is a buffer, not a parameter
        vectors = [key for key, tensor in full.items() if tensor.ndim == 1 and "e_score_correction_bias" not in key]
        sections = to_dict(config)
        optimizer = {
            **{name: value for section in OPTIONS for name, value in sections[section].items()},
            "betas": [options.adam_beta1, options.adam_beta2],
            "eps": options.adam_eps,
            "clip_grad": options.clip_grad or None,
            "no_decay": [] if options.weight_decay_all else sorted(vectors),
            "rope_window_bases": model.window_bases(),
            "weighting": asdict(config.weighting) | {"strength": config.weighting.strength},
        }
        (self.folder / "optimizer.json").write_text(json.dumps(optimizer, indent=2) + "\n")

    def after_step(self, done: StepRecord) -> None:
        """Write the rows, the window and the weights of one optimizer step."""
        ranks, mine = self.ranks, self.weigher.take_rows()
        weighted = self.config.weighting.by_losses
        row_at: RowAt = self.inputs.train.row
        if self.config.weighting.by_exposure:
            row_at = exposure_rows(row_at, map(row_at, done.samples), self.config)
        parts: list[Any] | None = [None] * ranks.world_size if ranks.world == 0 else None
        if weighted:  # each row from one of the processes that have it
            dist.gather_object(mine if ranks.reports_loss and ranks.context == 0 else {}, parts, dst=0)
        if parts is None:
            return
        rows = [row_at(sample) for sample in done.samples]
        ends, weights = [row.document_ends for row in rows], [row.weights for row in rows if row.weights is not None]
        arrays: dict[str, Any] = {
            "tokens": np.stack([row.tokens for row in rows]),
            "loss_mask": np.stack([row.trained for row in rows]),
            "document_ends": np.concatenate(ends).astype(np.int64),
            "document_ends_offsets": np.cumsum([0] + [len(e) for e in ends]),
            "window": np.int64(done.window),
        }
        if weights:  # of the dataset, or by exposure
            arrays["weights"] = np.where(arrays["loss_mask"], np.stack(weights), np.float32(0))
        if weighted:
            by_sample = {sample: row for part in parts for sample, row in part.items()}
            weighed = [by_sample[sample] for sample in done.samples]
            short = [row.short_loss for row in weighed if row.short_loss is not None]
            arrays["weights"] = np.stack([row.weights for row in weighed])
            arrays |= {"short_loss": np.stack(short)} if short else {}
        np.savez(self.folder / f"step_{done.step:06d}.npz", **arrays)
