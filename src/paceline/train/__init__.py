"""Training of drafts: the target writes text, a draft learns to guess it, and a card says how well it does."""
