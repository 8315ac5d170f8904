"""Diagnosis of a run: metrics in, findings with remedies out."""
