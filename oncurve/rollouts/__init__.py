"""Who samples completions from the policy?"""
