"""Decisions of the engine and of a cluster. They are pure: no I/O, and time is an argument."""
