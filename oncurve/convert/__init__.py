"""How does a script for another trainer become a recipe?"""
