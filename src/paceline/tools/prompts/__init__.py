"""Prompts and arrival times of benchmark runs."""
