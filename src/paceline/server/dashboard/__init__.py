"""The dashboard: its data and its static files."""
