"""The shared vocabulary: requests, outputs, sequences, configuration, status, errors and the clock. Standard library only."""
