"""The trainer's side of rollout servers: asking them, starting them, and surviving their loss."""
