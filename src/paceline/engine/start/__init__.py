"""How an engine is built: models, proposers, compiled kernels."""
