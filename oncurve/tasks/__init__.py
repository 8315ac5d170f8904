"""Generated tasks that a small model can learn from nothing. Plain data, no torch."""
