"""Long-context pretraining on Megatron-Core: context-window schedules, document masks, exact losses."""

__version__ = "1.0.0"
