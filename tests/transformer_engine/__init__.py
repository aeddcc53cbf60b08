"""Transformer Engine's own Python on an emulated CUDA machine: only what is compiled is replaced, by plain torch."""

SERVER = "tests.transformer_engine.fork_server"  # processes on that machine are forked from this program
WITHOUT_CUDA = f"{SERVER} cpu"  # as in an image for GPUs on a machine that has none
