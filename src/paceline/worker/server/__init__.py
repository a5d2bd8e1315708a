"""A target worker: an engine behind a socket."""
