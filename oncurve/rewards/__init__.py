"""Rewards: text in, Reward out; never imports torch."""
