"""Draft heads and distilled drafts: models, folders, loading."""
