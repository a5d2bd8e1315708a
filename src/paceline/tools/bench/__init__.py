"""Measuring: plain and speculative decoding in turns."""
