"""Monitoring of a run: metrics on disk, a progress line, stability figures, and a report."""
