"""Runners on a GPU: fused decoding, ragged prefill, memory."""
