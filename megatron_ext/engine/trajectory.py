"""`--dump-trajectory`: all that an outsider needs to repeat a run without this package.

    step_000000.npz ...       tokens int64 [B, L+1], loss_mask bool [B, L], window, and the document ends of row b:
                              document_ends[document_ends_offsets[b] : document_ends_offsets[b + 1]], in 1..L.
                              With token weighting, in the rows' order whatever the layout: weights float32 [B, L], what
                              each loss was multiplied by (0 where nothing is trained); where the score compares
                              contexts, short_loss float32 [B, L], NaN where both are the same and none was computed
    initial.safetensors       weights before the first step, by Hugging Face names
    final.safetensors         weights after the last
    config.json               the Hugging Face configuration
    optimizer.json            betas, eps, weight_decay, clip_grad (null: never), no_decay (names); document_mask,
                              window_mask, local_window, window_attn_skip_freq, rope_window_bases
                              ([window, base]: of windows up to this), no_rope_freq, z_loss and weighting
                              as in the configuration

The learning rate of each step is in metrics.jsonl. Every process calls every method; process 0 writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_ext.checkpoint.hf_config import hugging_face_config
from megatron_ext.config import Config
from megatron_ext.data.dataset import TokenRow
from megatron_ext.engine.model import PackedGPT
from megatron_ext.engine.parallel import Ranks
from megatron_ext.engine.rows import RowAt
from megatron_ext.engine.weighting import WeighedRow
from megatron_ext.engine.weights import gather


class Trajectory:
    """Writes one run's trajectory into a folder."""

    def __init__(
        self, folder: Path, chunks: Sequence[PackedGPT], config: Config, vocab_size: int, ranks: Ranks
    ) -> None:
        self.folder, self.chunks, self.config = folder, chunks, config
        self.vocab_size, self.ranks = vocab_size, ranks
        if ranks.world == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(_plain_config(config, vocab_size), indent=2) + "\n")

    def has(self, name: str) -> bool:
        """Whether an earlier part of this run wrote these weights; the same answer on every process."""
        answer = [(self.folder / f"{name}.safetensors").is_file()]
        dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def weights(self, name: str) -> None:
        """Write the weights as they are now, `initial` or `final`."""
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
            "no_decay": sorted(key for key, tensor in full.items() if tensor.ndim == 1),
            "document_mask": self.config.window.document_mask,
            "window_mask": self.config.window.window_mask,
            "local_window": self.config.model.local_window,
            "window_attn_skip_freq": self.config.model.window_attn_skip_freq,
            "rope_window_bases": self.config.model.window_bases(),
            "no_rope_freq": self.config.model.no_rope_freq,
            "z_loss": self.config.training.z_loss,
            "weighting": asdict(self.config.weighting) | {"strength": self.config.weighting.strength},
        }
        (self.folder / "optimizer.json").write_text(json.dumps(optimizer, indent=2) + "\n")

    def step(
        self, step: int, samples: Sequence[int], row_at: RowAt, window: int, weighed: Mapping[int, WeighedRow]
    ) -> None:
        """Write the rows, the window and the weights of one optimizer step that is done.

        Args:
            step: its number.
            samples, row_at: the rows of its global batch.
            window: its attention window.
            weighed: what this process weighed of them, by sample.
        """
        everyones = self._gathered(weighed)
        if self.ranks.world != 0:
            return
        rows = [row_at(sample) for sample in samples]
        ends = [row.document_ends for row in rows]
        np.savez(
            self.folder / f"step_{step:06d}.npz",
            tokens=np.stack([row.tokens for row in rows]),
            loss_mask=np.stack([row.trained for row in rows]),
            document_ends=np.concatenate(ends).astype(np.int64),
            document_ends_offsets=np.cumsum([0] + [len(e) for e in ends]),
            window=np.int64(window),
            **self._weights(samples, rows, everyones),
        )

    def _gathered(self, weighed: Mapping[int, WeighedRow]) -> dict[int, WeighedRow]:
        """What all processes weighed, on process 0; a row comes from one of the processes that know it."""
        if self.config.weighting.token_weighting not in ("unfrozen", "frozen"):
            return {}
        mine = weighed if self.ranks.reports_loss and self.ranks.context == 0 else {}
        parts: list[Any] | None = [None] * self.ranks.world_size if self.ranks.world == 0 else None
        dist.gather_object(mine, parts, dst=0)
        return {sample: row for part in parts or () for sample, row in part.items()}

    def _weights(
        self, samples: Sequence[int], rows: Sequence[TokenRow], weighed: Mapping[int, WeighedRow]
    ) -> dict[str, Any]:
        kind = self.config.weighting.token_weighting
        if kind == "none":
            return {}
        if kind == "dataset":
            given = [np.where(row.trained, row.weights, np.float32(0)) for row in rows if row.weights is not None]
            return {"weights": np.stack(given)}
        in_order = [weighed[sample] for sample in samples]
        found = {"weights": np.stack([row.weights for row in in_order])}
        short = [row.short_loss for row in in_order if row.short_loss is not None]
        return found | ({"short_loss": np.stack(short)} if short else {})


def _plain_config(config: Config, vocab_size: int) -> dict[str, Any]:
    """The model without local layers and layers without angles: optimizer.json says them, as it does the masks."""
    plain = replace(config.model, local_window=None, window_attn_skip_freq=None, no_rope_freq=None)
    entries = hugging_face_config(plain, vocab_size, config.data.seq_length)
    return {name: value for name, value in entries.items() if name != "rope_scaling"}
