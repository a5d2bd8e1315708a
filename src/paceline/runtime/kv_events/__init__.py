"""KV events: published by workers, followed by gateways."""
