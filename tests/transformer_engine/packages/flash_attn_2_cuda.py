"""The compiled part of flash-attn, of which Transformer Engine imports one function for its own context parallelism."""


def varlen_bwd(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("not emulated")
