"""The two ways to run a step: ragged passes from the host, and CUDA graphs."""
