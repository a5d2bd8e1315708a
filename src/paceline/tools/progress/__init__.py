"""Progress of a long run, and how a run is stopped."""
