"""The in-process engine, which samples many completions at once."""
