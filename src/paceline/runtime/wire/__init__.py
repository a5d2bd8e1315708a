"""Messages, sockets, keys: what every connection between workers uses."""
