"""Weights of safetensors folders in the formats of model families and of quantisation tools."""
