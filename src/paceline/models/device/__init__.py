"""CUDA graphs and memory of a device."""
