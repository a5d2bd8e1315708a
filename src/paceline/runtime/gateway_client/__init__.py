"""The gateway's side of target workers: routing, streams, failover."""
