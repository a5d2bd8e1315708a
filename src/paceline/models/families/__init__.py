"""What the configuration of each model family says."""
