"""The decoder: its layers, its forward pass, and how its weights are loaded."""
