"""Prompts computed by a prefill worker and decoded by another worker."""
