"""Weights on their way to rollout servers: whole, as differences, as adapters, in files or from GPU to GPU."""
