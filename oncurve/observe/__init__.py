"""Metrics, the run folder, progress and plots."""
