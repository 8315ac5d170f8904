"""How do weights reach vLLM without files? From GPU to GPU, or on one."""
