"""One operation per file: a torch reference, and faster versions that a test pins to it."""
