"""Rollout servers: sampling on other machines, and surviving their loss."""
