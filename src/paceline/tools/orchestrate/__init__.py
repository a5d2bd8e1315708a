"""The speculative loop over two servers that speak the OpenAI API: one drafts, the other verifies."""
