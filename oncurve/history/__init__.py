"""Runs that are over: their steps read again, done again, and graded again."""
