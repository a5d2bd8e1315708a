"""The client of target workers: routing, health, streams, failover."""
