"""Torch modules, and how weights, tokenizers and chat templates reach them."""
