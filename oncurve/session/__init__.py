"""A run from its recipe to its result, and resuming it."""
