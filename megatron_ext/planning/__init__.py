"""Computes what a run will cost before it runs: FLOPs, memory, and the papers' recipes side by side."""

from megatron_ext.planning.flops import training_flops

__all__ = ["training_flops"]
