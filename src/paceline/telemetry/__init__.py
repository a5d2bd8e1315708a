"""The format of logs, and traces."""
