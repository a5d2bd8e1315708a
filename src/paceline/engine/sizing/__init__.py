"""The limits of an engine, the memory of its parts, and the cost of its passes."""
