"""Runners: a model with the blocks of its paged cache."""
