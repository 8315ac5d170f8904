"""Rollout servers: sampling on other GPUs and machines, the weights that travel there, and starting it all."""
