"""Estimates of a run's cost before it starts: FLOPs, memory and time, and tables of the papers' recipes."""

from megatron_ext.planning.flops import training_flops

__all__ = ["training_flops"]
