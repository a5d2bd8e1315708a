"""Triton kernels for sampling, acceptance and draft trees."""
