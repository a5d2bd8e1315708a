"""Finished texts are computed again without speculation and compared."""
