"""Draft trees: growing and ranking."""
