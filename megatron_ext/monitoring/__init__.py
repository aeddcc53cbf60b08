"""Monitoring of a run: metrics on disk, a progress line, stability figures, and a report."""

from megatron_ext.monitoring.metrics import MetricsWriter, read_jsonl
from megatron_ext.monitoring.progress import Progress

__all__ = ["MetricsWriter", "Progress", "read_jsonl"]
