"""Target models: configuration, layers and forward pass."""
