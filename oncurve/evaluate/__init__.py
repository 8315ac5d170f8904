"""Measuring a model: accuracy, intervals, benchmarks and comparisons."""
