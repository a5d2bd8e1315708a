"""One operation per file: a torch reference, and faster versions that tests compare with it."""
