"""Tool calls: prompts and parsing."""
