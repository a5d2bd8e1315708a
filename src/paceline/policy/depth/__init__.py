"""How many tokens to draft: observations in, a depth for each sequence out."""
