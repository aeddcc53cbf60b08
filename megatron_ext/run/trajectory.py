"""`--dump-trajectory`: write all data needed to reproduce a run without this package.

    step_000000.npz ...       tokens int64 [B, L+1], loss_mask bool [B, L], window, and the document ends of row b:
                              document_ends[document_ends_offsets[b] : document_ends_offsets[b + 1]], in 1..L.
                              With token weighting, in the rows' order under any layout: weights float32 [B, L], the
                              factor of each loss (0 for untrained tokens); if the score compares contexts,
                              short_loss float32 [B, L], NaN where both are the same and none was computed
    initial.safetensors       weights before the first step, by Hugging Face names
    final.safetensors         weights after the last
    config.json               the Hugging Face configuration
    optimizer.json            betas, eps, weight_decay, clip_grad (null: never), no_decay (names); document_mask,
                              window_mask, local_window, window_attn_skip_freq, local_window_fixed,
                              rope_window_bases
                              ([window, base]: for windows up to this), no_rope_freq, z_loss, moe_aux_loss_coeff,
                              moe_router_load_balancing_type, micro_batch_size and weighting
                              as in the configuration

The learning rate of each step is in metrics.jsonl. Every process calls every method; process 0 writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.config import Config
from megatron_ext.data.rows.dataset import TokenRow
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.parallel import Ranks, run_on_rank0
from megatron_ext.engine.weights import gather
from megatron_ext.run.inputs import Inputs
from megatron_ext.run.records import StepRecord
from megatron_ext.run.rows import row_arrays
from megatron_ext.token_weighting.weigher import WeighedRow, Weigher


class Trajectory:
    """Writes one run's trajectory to `--dump-trajectory`, a folder that is created if missing.

    Args:
        config: the run's.
        chunks: the model of this pipeline stage.
        ranks: this process's.
        inputs: of the run; its vocabulary and rows are used.
        weigher: keeps the rows that it weighs.
    """

    def __init__(
        self, config: Config, chunks: Sequence[PackedGPT], ranks: Ranks, inputs: Inputs, weigher: Weigher
    ) -> None:
        self.folder = folder = Path(config.checkpoint.dump_trajectory or "")
        self.config, self.chunks, self.ranks, self.weigher = config, chunks, ranks, weigher
        self.vocab_size, self.row_at = inputs.vocab_size, inputs.rows.train

        def describe() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            # Gemma keeps its type, because its local layers have separate angles; other models are written without
            # local layers and layers without angles: optimizer.json records these, like the masks.
            plain = config.model
            if plain.block != "gemma3":
                plain = replace(plain, local_window=None, window_attn_skip_freq=None, no_rope_freq=None)
            entries = hugging_face_config(plain, self.vocab_size, config.data.seq_length)
            entries.pop("rope_scaling", None)
            (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n")

        run_on_rank0(ranks, describe, folder)

    def begin(self, step: int) -> None:
        """Write the initial weights, unless the run resumes after `step` steps and an earlier start wrote them."""
        written = [step > 0 and (self.folder / "initial.safetensors").is_file()]
        dist.broadcast_object_list(written, src=0)
        if not written[0]:
            self.weights("initial")

    def weights(self, name: str) -> None:
        """Write the current weights, as `initial` or `final`."""
        full = gather(self.chunks, self.config.model, self.vocab_size, self.ranks)
        if full is None:
            return
        if not self.config.model.untie_embeddings_and_output_weights:
            full.pop("lm_head.weight", None)
        save_file(full, self.folder / f"{name}.safetensors", metadata={"format": "pt"})
        options = self.config.optimizer
        optimizer = {
            "betas": [options.adam_beta1, options.adam_beta2],
            "eps": options.adam_eps,
            "weight_decay": options.weight_decay,
            "clip_grad": options.clip_grad or None,
            "no_decay": sorted(
                key for key, tensor in full.items() if tensor.ndim == 1 and not options.weight_decay_all
            ),
            "document_mask": self.config.window.document_mask,
            "window_mask": self.config.window.window_mask,
            "local_window": self.config.model.local_window,
            "window_attn_skip_freq": self.config.model.window_attn_skip_freq,
            "local_window_fixed": self.config.window.local_window_fixed,
            "rope_window_bases": self.config.model.window_bases(),
            "no_rope_freq": self.config.model.no_rope_freq,
            "z_loss": self.config.training.z_loss,
            "qk_clip_threshold": self.config.optimizer.qk_clip_threshold,
            "moe_aux_loss_coeff": self.config.training.moe_aux_loss_coeff,
            "moe_router_load_balancing_type": self.config.training.moe_router_load_balancing_type,
            "micro_batch_size": self.config.data.micro_batch_size,
            "weighting": asdict(self.config.weighting) | {"strength": self.config.weighting.strength},
        }
        (self.folder / "optimizer.json").write_text(json.dumps(optimizer, indent=2) + "\n")

    def after_step(self, done: StepRecord) -> None:
        """Write the rows, the window and the weights of one optimizer step."""
        weighed = self._gathered()
        if self.ranks.world != 0:
            return
        rows = [self.row_at(sample) for sample in done.samples]
        weights = self._weights(rows, [weighed.get(sample) for sample in done.samples])
        np.savez(self.folder / f"step_{done.step:06d}.npz", **(row_arrays(rows, done.window) | weights))

    def _gathered(self) -> dict[int, WeighedRow]:
        """Gather the weighted rows of all processes on process 0, each from one of the processes that have it."""
        taken = self.weigher.take_rows()
        if self.config.weighting.token_weighting not in ("unfrozen", "frozen"):
            return {}
        mine = taken if self.ranks.reports_loss and self.ranks.context == 0 else {}
        parts: list[Any] | None = [None] * self.ranks.world_size if self.ranks.world == 0 else None
        dist.gather_object(mine, parts, dst=0)
        return {sample: row for part in parts or () for sample, row in part.items()}

    def _weights(self, rows: Sequence[TokenRow], weighed: Sequence[WeighedRow | None]) -> dict[str, Any]:
        """Stack the arrays of the step's weights, in the rows' order; {} if the step computes none."""
        if self.config.weighting.token_weighting in (
            "none",
            "dataset",
        ):  # weights of the dataset are in its rows
            return {}
        in_order = [row for row in weighed if row is not None]
        short = [row.short_loss for row in in_order if row.short_loss is not None]
        weights = {"weights": np.stack([row.weights for row in in_order])}
        return weights | ({"short_loss": np.stack(short)} if short else {})
