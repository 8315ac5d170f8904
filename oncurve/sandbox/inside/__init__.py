"""Code that runs inside the sandbox: standard library only, sent to the interpreter there as source text."""
