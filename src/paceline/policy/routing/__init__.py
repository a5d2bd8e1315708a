"""Which target worker takes a request."""
