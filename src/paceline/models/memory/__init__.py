"""Memory of models: staged copies, checksums, zeroed blocks."""
