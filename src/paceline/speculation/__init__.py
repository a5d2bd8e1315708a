"""Guessing tokens and checking the guesses: proposers, drafts, verification, depth."""
