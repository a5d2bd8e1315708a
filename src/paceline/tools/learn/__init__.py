"""`paceline learn`: trains a draft further on what a server generates, and offers it to the server."""
