"""Commands that change the pools of a running cluster."""
