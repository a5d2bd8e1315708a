"""Drafts in training: EAGLE, Medusa, distilled."""
