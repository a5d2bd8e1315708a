"""Verification: the target distribution, the two acceptance rules, and the noise."""
