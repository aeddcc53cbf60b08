"""What a run will cost, before it runs."""

from megatron_ext.planning.flops import training_flops

__all__ = ["training_flops"]
