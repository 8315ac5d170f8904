"""Metrics, the run folder and progress."""
