"""The core: what trains a policy by GRPO. It imports nothing else of the package."""
