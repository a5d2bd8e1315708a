"""Where a model's files are found, and shapes of inflated models."""
