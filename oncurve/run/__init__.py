"""A run: its parts made from the sections of its recipe, and what goes on from there."""
