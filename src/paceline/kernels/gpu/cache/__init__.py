"""Kernels that move blocks of a paged cache."""
