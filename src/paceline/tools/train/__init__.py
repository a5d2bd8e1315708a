"""Training of drafts: the target generates text, a draft learns to predict it, and a card holds its scores."""
