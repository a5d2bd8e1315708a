"""When the plugin drafts: what drafts are worth and what they cost in vLLM."""
