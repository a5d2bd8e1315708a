"""What a running engine reports, and what can be changed in it."""
