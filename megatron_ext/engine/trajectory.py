"""`--dump-trajectory`: all that an outsider needs to repeat a run without this package.

    step_000000.npz ...       tokens int64 [B, L+1], loss_mask bool [B, L], window, and the document ends of row b:
                              document_ends[document_ends_offsets[b] : document_ends_offsets[b + 1]], in 1..L
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
from collections.abc import Sequence
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

    def step(self, step: int, rows: Sequence[TokenRow], window: int) -> None:
        """Write the rows and the window of one optimizer step."""
        if self.ranks.world != 0:
            return
        ends = [row.document_ends for row in rows]
        np.savez(
            self.folder / f"step_{step:06d}.npz",
            tokens=np.stack([row.tokens for row in rows]),
            loss_mask=np.stack([row.trained for row in rows]),
            document_ends=np.concatenate(ends).astype(np.int64),
            document_ends_offsets=np.cumsum([0] + [len(e) for e in ends]),
            window=np.int64(window),
        )


def _plain_config(config: Config, vocab_size: int) -> dict[str, Any]:
    """The model without local layers and layers without angles: optimizer.json says them, as it does the masks."""
    plain = replace(config.model, local_window=None, window_attn_skip_freq=None, no_rope_freq=None)
    entries = hugging_face_config(plain, vocab_size, config.data.seq_length)
    return {name: value for name, value in entries.items() if name != "rope_scaling"}
