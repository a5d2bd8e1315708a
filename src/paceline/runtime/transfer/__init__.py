"""Transfers of bytes between workers: KV, cache blocks and weights. See docs/transfer.md."""
