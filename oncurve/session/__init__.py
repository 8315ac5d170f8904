"""A run from its recipe to its result, resuming it, and the same from Python: `oncurve.Trainer` and its verbs."""
