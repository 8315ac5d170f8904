"""The small base model of the package, built from random weights by supervised training."""
