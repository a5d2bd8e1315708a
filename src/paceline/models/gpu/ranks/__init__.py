"""Tensor parallelism on GPUs: all ranks compute the passes of rank 0, as CUDA graphs."""
