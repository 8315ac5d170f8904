"""What may a recipe say?"""
