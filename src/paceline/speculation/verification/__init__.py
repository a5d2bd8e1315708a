"""Verification: the target distribution, the two acceptance rules, noise, grammars."""
