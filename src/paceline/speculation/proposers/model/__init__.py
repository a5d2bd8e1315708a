"""The proposers that draft with a model: a draft model, or the target's own first layers."""
