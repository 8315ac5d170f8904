"""Which formulas turn rewards and log-probabilities into a loss? Pure functions of tensors."""
