"""Status: what an engine counts, what a worker reports, and what operators see."""
