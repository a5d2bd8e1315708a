"""The bodies of requests and responses, as OpenAPI documents them."""
