"""Live pools: which workers should run, and which to start, drain or replace next."""
