"""The audit log, and strict mode, in which every answer is written to it."""
