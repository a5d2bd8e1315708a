"""The requests of an engine: they are queued, receive their tokens, and end."""
