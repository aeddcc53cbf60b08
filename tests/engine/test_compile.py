"""`--compile`: the layers are graphs, attention stays outside them, and loss and gradients are the same."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.attention.interface import AttentionCall
from megatron_ext.batch import pack
from megatron_ext.config.arguments import parse
from megatron_ext.data.row import TokenRow
from megatron_ext.masks import MaskOptions
from tests.one_process import build_models, one_process

LENGTH = 24
VOCABULARY = 64
LAYERS = 3


@contextmanager
def compiling() -> Iterator[list[torch.fx.GraphModule]]:
    """Compile in this process alone; the graphs that torch.compile makes are listed, and run as they are."""
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, one_process():
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
        yield graphs


@pytest.mark.parametrize("nope", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_many_layers_are_all_compiled(nope: int | None) -> None:
    """Equal layers share their graphs; if some have no RoPE, all are still compiled."""
    layers = 10
    flags = f"--num-layers {layers} --vocab-size {VOCABULARY} --seq-length {LENGTH} --compile"
    config = parse(f"{flags} --no-rope-freq {nope or 'none'}".split())
    limit = torch.compiler.config.recompile_limit
    row = TokenRow(np.ones(LENGTH + 1, dtype=np.int64), np.array([LENGTH]), np.ones(LENGTH, dtype=np.bool_))
    try:
        with compiling() as graphs:
            (chunk,) = build_models(config)
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                chunk(pack([row], LENGTH, MaskOptions(document_mask=True, num_layers=layers)))
    finally:
        torch.compiler.config.recompile_limit = limit
    # six parts of a layer, and once more for the first one, whose input lies otherwise
    assert (len(graphs) <= 12) == (nope is None), len(graphs)


def test_a_compiled_step_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--num-layers {LAYERS} --vocab-size {VOCABULARY} --init-method-std 0.2 --seq-length {LENGTH}".split()
    traced: list[bool] = []
    run = AttentionCall.run
    monkeypatch.setattr(
        AttentionCall, "run", lambda self, *args: (traced.append(torch.compiler.is_compiling()), run(self, *args))[1]
    )
    chance = np.random.default_rng(0)
    row = TokenRow(chance.integers(1, VOCABULARY, LENGTH + 1), np.array([5, 23]), np.ones(LENGTH, dtype=np.bool_))
    with compiling() as graphs:
        plain, compiled = build_models(parse(flags), parse([*flags, "--compile"]))
        for window in (7, LENGTH):
            batch = pack([row], window, MaskOptions(document_mask=True, num_layers=LAYERS))
            losses = [model(batch).cross_entropy_t.sum() for model in (plain, compiled)]
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
            for model, loss in zip((plain, compiled), losses, strict=True):
                model.zero_grad()
                loss.backward()
            for compiled_parameter, plain_parameter in zip(compiled.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(compiled_parameter.grad, plain_parameter.grad, rtol=1e-5, atol=1e-7)
    assert traced == [False] * (2 * 2 * LAYERS)
    assert graphs
    operations = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert any("silu" in name for name in operations)
    assert any("rms_norm" in name for name in operations)
    assert not any("softmax" in name for name in operations)
