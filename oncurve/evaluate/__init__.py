"""How good is a model, and how sure are we?"""
