"""The policy: log-probabilities, gradients and updates, on one device or on many."""
