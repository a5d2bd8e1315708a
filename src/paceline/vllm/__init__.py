"""A plugin for vLLM: our proposers and draft pool draft for it, and our noise samples for it."""
