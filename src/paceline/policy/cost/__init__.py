"""What speculation costs and saves, and the advice that follows from it."""
