"""What one tensor-parallel rank's first weights cost the host: seconds and peak memory, of a few layers.

    python benchmarks/first_weights.py --model-preset Llama-3-8B --tensor-model-parallel-size 8 --layers 1

`whole` draws each tensor at once and cuts the rank's part from it; `blocks` is what training does. Each runs in a
process of its own. The embedding and the output matrix are counted once, the layers as often as the model has them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_ext.checkpoint.hf.names import Cut, Parameter, Piece, columns, full_shape, parameters_of, pieces
from megatron_ext.config import ModelConfig
from megatron_ext.config.arguments import parse
from megatron_ext.engine.weights import Blocks, Initial, fill

WAYS = ("whole", "blocks")


def whole_tensors(model: ModelConfig, vocab_size: int) -> Blocks:
    """Give each tensor as one block."""

    def blocks(name: str, wanted: Sequence[Piece], wide: slice | None) -> Iterator[tuple[int, Tensor]]:
        shape = full_shape(name, model, vocab_size)
        yield 0, torch.empty(shape).normal_() if wide is None else torch.empty(shape).normal_()[:, wide]

    return blocks


def measure(
    way: str, model: ModelConfig, tp: int, layers: int, answer: multiprocessing.Queue[dict[str, float]]
) -> None:
    """Fill the last rank's tensors one after the other, bf16; tell seconds and bytes at the most beyond the shard."""
    assert model.vocab_size is not None
    vocab_size = model.vocab_size
    blocks = Initial(model, vocab_size, 1).blocks if way == "blocks" else whole_tensors(model, vocab_size)
    seconds = {"layer": 0.0, "rest": 0.0}
    before, largest = resident(), 0
    for number in range(layers):
        for parameter in parameters_of(model):
            if number and not parameter.stacked:
                continue
            shard = empty_shard(parameter, model, vocab_size, tp)
            names = parameter.names((number,) if parameter.stacked else ())
            largest = max(largest, shard.numel() * shard.element_size())
            began = time.perf_counter()
            fill(shard, parameter, names, model, vocab_size, (tp - 1, tp), blocks)
            seconds["layer" if parameter.stacked else "rest"] += time.perf_counter() - began
    total = seconds["layer"] / layers * model.num_layers + seconds["rest"]
    answer.put({"seconds": total, "bytes": resident() - before - largest})


def empty_shard(parameter: Parameter, model: ModelConfig, vocab_size: int, tp: int) -> Tensor:
    """Make the memory of the last rank's part."""
    shape = full_shape(parameter.hugging_face[0], model, vocab_size)
    if parameter.cut is Cut.VOCABULARY:
        rows = model.padded_vocab_size(vocab_size) // tp
    else:
        rows = sum(piece.last - piece.first for piece in pieces(parameter, model, vocab_size, tp - 1, tp))
    if len(shape) == 1:
        return torch.empty(rows, dtype=torch.bfloat16)
    wide = columns(parameter, shape[1], tp - 1, tp)
    return torch.empty(rows, wide.stop - wide.start, dtype=torch.bfloat16)


def resident() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure both ways and print them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-preset", default="Llama-3-8B")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1)
    options = parser.parse_args()
    model = replace(parse(["--model-preset", options.model_preset]).model, make_vocab_size_divisible_by=128)
    tp = options.tensor_model_parallel_size
    context = multiprocessing.get_context("spawn")
    for way in WAYS:
        answer = context.Queue()
        process = context.Process(target=measure, args=(way, model, tp, options.layers, answer))
        process.start()
        found = answer.get()
        process.join()
        gib = math.ceil(100 * found["bytes"] / 2**30) / 100
        print(json.dumps({"way": way, "tensor_parallel": tp, "seconds": round(found["seconds"], 1), "peak_gib": gib}))


if __name__ == "__main__":
    main()
