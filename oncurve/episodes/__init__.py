"""Episodes: completions in which tools and environments answer the policy."""
