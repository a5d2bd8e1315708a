"""API keys, rate limits, TLS, strict mode and its audit log."""
