"""Worker profiles, the simulator of a cluster, and the sizing of its pools."""
