"""Which workers may be trusted, and when a failed worker is restarted."""
