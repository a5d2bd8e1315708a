"""The shared vocabulary. Standard library only."""
