"""Converter from scripts and options of TRL to recipes."""
