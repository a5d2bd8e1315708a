"""Live pools: which workers should run, which to start, drain or replace next."""
