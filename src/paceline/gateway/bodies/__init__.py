"""Checks of request bodies, in a process of their own if they are large."""
