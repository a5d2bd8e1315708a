"""The formats of weights: safetensors folders, GGUF files, quantised weights."""
