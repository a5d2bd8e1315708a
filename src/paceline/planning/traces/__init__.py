"""Requests to simulate: files of public traces, and synthetic traffic."""
