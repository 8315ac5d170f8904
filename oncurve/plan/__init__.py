"""What will a run need, and what will it cost? Arithmetic without torch."""
