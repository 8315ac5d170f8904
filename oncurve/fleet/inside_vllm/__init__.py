"""Code that runs inside vLLM, in an environment that lacks most of what the rest of this package imports."""
