"""A run from its recipe to its result: loop, services, checkpoints, resuming, and the same from Python."""
