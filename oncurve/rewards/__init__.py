"""What is a completion worth? Text in, Reward out; never imports torch."""
