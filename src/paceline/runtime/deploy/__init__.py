"""Workers as local processes or Ray actors, and the cluster file that describes them."""
