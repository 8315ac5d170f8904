"""Planner: memory, time and cost of a run, without torch."""
