"""Larger models made of a small one, for measuring."""
