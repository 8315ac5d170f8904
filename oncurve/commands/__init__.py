"""What the commands do, below the command line. Heavy imports stay inside functions."""
