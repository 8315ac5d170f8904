"""Sandboxes for untrusted programs."""
