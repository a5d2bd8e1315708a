"""Cached blocks in host memory and on disk: eviction from the device, and loading back."""
