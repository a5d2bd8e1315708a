"""Worker profiles, request traces, the simulator of a cluster, and the planner that sizes its pools."""
