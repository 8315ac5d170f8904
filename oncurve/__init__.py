"""Train reasoning models with GRPO: sample groups, reward them, push the policy toward the better completions."""

__version__ = "0.1.0"
