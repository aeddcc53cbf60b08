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
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.checkpoint.hf.config import hugging_face_config
from megatron_ext.checkpoint.hf.folder import save_tensors
from megatron_ext.config import Config
from megatron_ext.config.arguments import to_dict
from megatron_ext.engine import agreement
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.weights import gather
from megatron_ext.run.callbacks import StepRecord
from megatron_ext.run.inputs import Inputs, RowAt
from megatron_ext.token_weighting.exposure import exposure_rows
from megatron_ext.token_weighting.weigher import WeighedRow, Weigher

OPTIONS = ("model", "data", "window", "optimizer", "training")  # sections of the configuration in optimizer.json


class Trajectory:
    """Writes one run's trajectory to `--dump-trajectory`, a folder that is created if missing.

    The initial weights are written here, unless the run resumes after `step` steps and an earlier start wrote them.
    """

    def __init__(
        self, config: Config, chunks: Sequence[PackedGPT], ranks: Ranks, inputs: Inputs, weigher: Weigher, step: int
    ) -> None:
        self.folder = Path(config.checkpoint.dump_trajectory or "")
        self.config = config
        self.chunks = chunks
        self.ranks = ranks
        self.inputs = inputs
        self.weigher = weigher
        if not agreement.run_on_rank0(self._describe, self.folder) or step == 0:
            self.weights("initial")

    def _describe(self) -> bool:
        """Write config.json; return whether the initial weights are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Only models whose local layers have separate angles keep the types of layers; optimizer.json records local
        # layers and layers without angles of the others, like the masks. Attention sinks are among the weights alone.
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
        config = self.config
        model = config.model
        options = config.optimizer
        tensors = gather(self.chunks, model, self.inputs.vocab_size, self.ranks)
        if tensors is None:
            return
        if not model.untie_embeddings_and_output_weights:
            tensors.pop("lm_head.weight", None)
        save_tensors(tensors, self.folder / f"{name}.safetensors")
        no_decay = []
        if not options.weight_decay_all:  # an expert bias is a buffer, not a parameter
            no_decay = [key for key in tensors if tensors[key].ndim == 1 and "e_score_correction_bias" not in key]
        sections = to_dict(config)
        optimizer = {
            **{name: value for section in OPTIONS for name, value in sections[section].items()},
            "betas": [options.adam_beta1, options.adam_beta2],
            "eps": options.adam_eps,
            "clip_grad": options.clip_grad or None,
            "no_decay": sorted(no_decay),
            "rope_window_bases": model.window_bases(),
            "weighting": asdict(config.weighting) | {"strength": config.weighting.strength},
        }
        (self.folder / "optimizer.json").write_text(json.dumps(optimizer, indent=2) + "\n")

    def after_step(self, done: StepRecord) -> None:
        """Write the rows, the window and the weights of one optimizer step."""
        weighed: Mapping[int, WeighedRow] = {}
        if self.config.weighting.by_losses:
            # ranks that share a row have computed the same weights for it
            weighed = ChainMap(*agreement.gather(self.weigher.take_rows()))
        if self.ranks.world != 0:
            return
        row_at: RowAt = self.inputs.train.row
        if self.config.weighting.by_exposure:
            row_at = exposure_rows(row_at, map(row_at, done.samples), self.config)
        rows = [row_at(sample) for sample in done.samples]
        arrays: dict[str, Any] = {
            "tokens": np.stack([row.tokens for row in rows]),
            "loss_mask": np.stack([row.trained for row in rows]),
            "document_ends": np.concatenate([row.document_ends for row in rows]).astype(np.int64),
            "document_ends_offsets": np.cumsum([0] + [len(row.document_ends) for row in rows]),
            "window": np.int64(done.window),
        }
        weights = [row.weights for row in rows if row.weights is not None]
        if weights:  # of the dataset, or by exposure
            arrays["weights"] = np.where(arrays["loss_mask"], np.stack(weights), np.float32(0))
        if self.config.weighting.by_losses:
            weighed_rows = [weighed[sample] for sample in done.samples]
            arrays["weights"] = np.stack([row.weights for row in weighed_rows])
            short_losses = [row.short_loss for row in weighed_rows if row.short_loss is not None]
            if short_losses:
                arrays["short_loss"] = np.stack(short_losses)
        np.savez(self.folder / f"step_{done.step:06d}.npz", **arrays)
