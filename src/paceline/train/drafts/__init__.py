"""Drafts as they train: EAGLE, Medusa, distilled, LoRA."""
