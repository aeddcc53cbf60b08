"""Count what thousands of ranks save and open: the index of a checkpoint, and the files that one rank reads.

    python benchmarks/checkpoint_index.py

A model of the shapes of Llama 405B with 128 layers is written by TP 8 x PP 8 x DP 64 (4,096 ranks) and read by
TP 4 x PP 4 x DP 64 (1,024 ranks), with bf16 weights and a distributed optimizer. No tensor is in memory: the parts are
described as in a run, and the index is written and read by the functions of a run. "index_s" is rank 0's work in
`write_index`, "read_s" that of each process that resumes; the files and blocks are those of one reading rank.
"""

import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from record import ROOT, Records, parser_of

sys.path.insert(0, str(ROOT))
import torch

from megatron_ext.checkpoint.manifest import FileFacts
from megatron_ext.checkpoint.tensors import (
    DTYPES,
    INDEX,
    Block,
    Shard,
    Stored,
    StoredTensor,
    Written,
    _overlap,
    write_index,
)
from megatron_ext.engine.optimizer_state import _rectangles

LAYERS, HIDDEN, FFN, KEYS, VOCABULARY = 128, 16384, 53248, 1024, 128256
# of a layer: rows, columns, and the axis that tensor parallelism divides
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN, 0),
    "self_attn.k_proj": (KEYS, HIDDEN, 0),
    "self_attn.v_proj": (KEYS, HIDDEN, 0),
    "self_attn.o_proj": (HIDDEN, HIDDEN, 1),
    "mlp.gate_proj": (FFN, HIDDEN, 0),
    "mlp.up_proj": (FFN, HIDDEN, 0),
    "mlp.down_proj": (HIDDEN, FFN, 1),
}
STATES = ("exp_avg", "exp_avg_sq", "fp32_param")
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Layout:
    """Sizes of the process grid."""

    tensor: int
    pipeline: int
    data: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def weights(self, tensor: int, pipeline: int) -> Iterator[Shard]:
        """Yield the weights of a place in the model, in the order of its gradient buffer."""
        layers = LAYERS // self.pipeline
        for layer in range(layers * pipeline, layers * (pipeline + 1)):
            for name, (rows, columns, axis) in MATRICES.items():
                yield self._part(f"model.layers.{layer}.{name}.weight", (rows, columns), axis, tensor)
        if pipeline == 0:
            yield self._part("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0, tensor)
        if pipeline == self.pipeline - 1:
            yield self._part("lm_head.weight", (VOCABULARY, HIDDEN), 0, tensor)

    def _part(self, name: str, shape: tuple[int, int], axis: int, tensor: int) -> Shard:
        sizes, offset = list(shape), [0, 0]
        sizes[axis] //= self.tensor
        offset[axis] = tensor * sizes[axis]
        part = torch.empty(sizes, dtype=torch.bfloat16, device="meta")
        return Shard.of(name, part, shape, tuple(offset))

    def shards(self, rank: int) -> list[Shard]:
        """Return what a rank holds: its weights, which the first data-parallel rank writes, and its optimizer state."""
        tensor, outer_rank = rank % self.tensor, rank // self.tensor
        data, pipeline = outer_rank % self.data, outer_rank // self.data
        weights = list(self.weights(tensor, pipeline))
        total = sum(math.prod(weight.sizes) for weight in weights)
        begin, end = total * data // self.data, total * (data + 1) // self.data
        held = [weight for weight in weights if data == 0]
        first = 0
        for weight in weights:
            size = math.prod(weight.sizes)
            start, stop = max(begin - first, 0), min(end - first, size)
            if start < stop:
                run = torch.empty(stop - start, device="meta")
                for state in STATES:
                    held += _rectangles(f"optimizer.state.{state}.", [weight], run, start, stop, writes=True)
            first += size
        return held


def written(layout: Layout, rank: int) -> Written:
    """Return what `tensors.write` returns for a rank, without writing."""
    file, place = f"tensors_{rank:05d}.safetensors", 0
    tensors = []
    for shard in layout.shards(rank):
        tensors.append(
            (
                shard.name,
                StoredTensor(shard.shape, NAMES[shard.dtype], (Block(shard.offset, shard.sizes, file, place),)),
            )
        )
        place += math.prod(shard.sizes) * shard.dtype.itemsize
    return Written(file, FileFacts(place, "0" * 64), tensors)


def measure(writer: Layout, reader: Layout) -> dict[str, Any]:
    parts = [written(writer, rank) for rank in range(writer.ranks)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        write_index(folder, parts)
        index_s = time.perf_counter() - began
        began = time.perf_counter()
        stored = Stored(folder)
        read_s = time.perf_counter() - began
        size = (folder / INDEX).stat().st_size
    opened = [
        block
        for shard in reader.shards(reader.ranks // 2)
        for block in stored.tensors[shard.name].blocks
        if _overlap(shard, block) is not None
    ]
    return {
        "files": writer.ranks,
        "blocks": sum(len(tensor.blocks) for tensor in stored.tensors.values()),
        "index_mb": round(size / 2**20, 1),
        "index_s": round(index_s, 2),
        "read_s": round(read_s, 2),
        "files_of_a_reader": len({block.file for block in opened}),
        "blocks_of_a_reader": len(opened),
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    records = Records("checkpoint index", options.output)
    writer, reader = Layout(8, 8, 64), Layout(4, 4, 64)
    records.measure(partial(measure, writer, reader), written_by=str(writer), read_by=str(reader))
    sys.exit(records.failed > 0)


if __name__ == "__main__":
    main()
