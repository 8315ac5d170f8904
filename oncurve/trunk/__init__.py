"""How are the layers of the Llama family computed fast on a CPU? Other models run through transformers' modules."""
