"""Prompts computed by a prefill worker, or cached by a peer, and decoded by another worker."""
