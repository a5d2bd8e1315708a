"""Checks that speculation does not change the text: prompts run with and without it, and every round is verified again."""
