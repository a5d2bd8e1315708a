"""Weights streamed from workers that already have them."""
