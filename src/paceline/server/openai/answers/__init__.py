"""Engine output as OpenAI responses and streams."""
