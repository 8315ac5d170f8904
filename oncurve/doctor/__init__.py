"""What is wrong with a run, how does one see it, and what helps? Metrics in, findings out."""
