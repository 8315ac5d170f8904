"""The recipe: its sections, its keys, and reading it from YAML."""
