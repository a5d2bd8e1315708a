"""Bytes from worker to worker: KV, cache blocks and weights. See docs/transfer.md."""
