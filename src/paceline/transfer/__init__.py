"""Transfers of bytes between workers: KV blocks and weights. See docs/transfer.md."""
