"""Where do prompts come from, in which order, and how do groups become tensors?"""
