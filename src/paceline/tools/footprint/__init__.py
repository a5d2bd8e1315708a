"""Bytes that a model and its drafts read in a step, and the bandwidth of the memory."""
