"""Failures stay with the sequence that causes them, and a step that hangs is noticed."""
