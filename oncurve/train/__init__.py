"""How is the policy updated, step by step?"""
