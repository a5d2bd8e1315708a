"""The time of each part of a step, measured step by step."""
