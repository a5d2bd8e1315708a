"""I/O around the engine: workers, the wire between them, and how they are started."""
