"""Target workers of other engines: vLLM or any OpenAI-compatible server behind the gateway's protocol."""
