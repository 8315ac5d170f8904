"""Data sets, prompts and their order, and the collation of groups into tensors."""
