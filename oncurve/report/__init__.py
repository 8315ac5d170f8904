"""Report, comparison and dashboard: one page per run, the same from a file and live."""
