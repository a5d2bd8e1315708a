"""`paceline doctor`: checks before anything starts."""
