"""The target's distribution of a row."""
