"""KV events: workers publish them, and gateways track the caches of all workers by them."""
