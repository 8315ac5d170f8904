"""The command line."""

from oncurve.cli.app import main

__all__ = ["main"]
