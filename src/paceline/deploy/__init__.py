"""Starts and watches the processes of a server or a cluster."""
