"""The HTTP server and its protocol."""
