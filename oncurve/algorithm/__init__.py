"""The formulas that turn rewards and log-probabilities into a loss: pure functions of tensors."""
