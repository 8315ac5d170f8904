"""Weight transfer to vLLM without files, from GPU to GPU or on one GPU."""
