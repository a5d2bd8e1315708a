"""Where the time of a step goes, measured step by step."""
