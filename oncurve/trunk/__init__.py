"""How are the layers of the Llama family computed fast? On a CPU in training and decoding, on a GPU in decoding."""
