"""Tensor parallelism: one process for each rank."""
