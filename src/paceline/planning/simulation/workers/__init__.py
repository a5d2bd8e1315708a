"""Simulated workers: batches, rounds, segments of steps, and caches."""
