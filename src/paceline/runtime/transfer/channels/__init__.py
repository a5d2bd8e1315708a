"""Transports for transfers: sockets, shared memory, NIXL."""
