"""Draft trees: growing, ranking, pruning, merging."""
