"""Transports for bulk data: sockets, shared memory, NIXL, files."""
