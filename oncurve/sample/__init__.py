"""Sampling completions from the policy in this process."""
