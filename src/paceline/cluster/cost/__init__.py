"""What speculation costs and saves, and advice that follows from it."""
