"""The EAGLE head."""
