"""What happened in a run? Metrics, run folder, pictures."""
