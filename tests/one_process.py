"""A test's own process as the only rank, and as it was before when the test is done."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ext.config import Config
from megatron_ext.engine import parallel, platform
from megatron_ext.engine.model import PackedGPT, build_chunks
from megatron_ext.engine.weights import initialise


@contextmanager
def one_process() -> Iterator[None]:
    """End the process groups that begin here, and take back what `platform.choose` changes, the environment too."""
    before = dict(os.environ)
    try:
        yield
    finally:
        parallel.stop()
        platform.uninstall_cpu()
        os.environ.clear()
        os.environ.update(before)


def build_models(*configs: Config) -> list[PackedGPT]:
    """Build whole models with initial weights, inside `one_process`."""
    here = platform.choose("cpu")
    models = []
    ranks = parallel.start(configs[0].parallel, configs[0].model.num_layers, here, seed=1)
    for config in configs:
        size = config.model.vocab_size
        (model,) = build_chunks(config, size, here)
        initialise([model], config.model, size, 1, ranks)
        models.append(model)
    return models
