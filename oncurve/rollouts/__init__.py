"""Samplers of completions from the policy."""
