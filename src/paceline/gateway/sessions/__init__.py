"""Admission, sessions and streams of HTTP requests."""
