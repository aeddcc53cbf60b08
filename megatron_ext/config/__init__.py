"""The configuration: options, their flags and YAML, checks across options, presets and stages."""

from megatron_ext.config.options import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    WeightingConfig,
    WindowConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
    "WeightingConfig",
    "WindowConfig",
]
