"""What a simulation is given: its configuration and its faults."""
