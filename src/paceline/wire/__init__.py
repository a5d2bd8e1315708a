"""Messages, sockets and keys that every connection between workers uses."""
