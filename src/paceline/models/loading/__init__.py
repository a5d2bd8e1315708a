"""Weights from safetensors folders, GGUF files, the hub cache and peers."""
