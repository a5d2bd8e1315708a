"""API keys, rate limits, middleware, strict mode and its audit log."""
