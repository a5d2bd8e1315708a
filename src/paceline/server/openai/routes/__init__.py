"""Routes of the OpenAI-compatible API."""
