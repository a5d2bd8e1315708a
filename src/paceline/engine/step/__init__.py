"""What the parts of a step exchange, and what listens to it."""
