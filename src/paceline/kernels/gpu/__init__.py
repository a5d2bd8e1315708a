"""Triton kernels, one operation per file. tests/kernels/gpu compares each with its torch reference."""
