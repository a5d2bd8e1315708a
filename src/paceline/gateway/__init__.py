"""The gateway: OpenAI-compatible HTTP, metrics, run-time flags."""
