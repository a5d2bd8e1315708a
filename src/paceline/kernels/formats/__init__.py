"""Weights in the order in which the kernels of GPUs read them."""
