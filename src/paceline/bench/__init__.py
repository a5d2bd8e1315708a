"""Measuring: plain and speculative decoding side by side."""
