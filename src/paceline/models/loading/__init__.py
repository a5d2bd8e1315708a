"""Loading of a model: from files, streamed, or inflated."""
