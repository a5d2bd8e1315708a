"""Attention over the paged cache on a GPU."""
