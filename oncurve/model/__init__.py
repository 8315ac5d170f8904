"""The layers of the Llama family: packed training and decoding on a CPU, decoding on a GPU."""
