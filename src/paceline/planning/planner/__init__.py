"""The planner of live pools, and the size that a cluster needs for a load."""
