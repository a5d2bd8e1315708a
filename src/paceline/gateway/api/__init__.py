"""The bodies of HTTP requests and responses."""
