"""Paged blocks and the prefix cache."""
