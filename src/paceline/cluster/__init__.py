"""Decisions of a cluster: pure, without I/O, with injected time."""
