"""Models: families, weights, the decoder, draft heads, runners and tensor parallelism."""
