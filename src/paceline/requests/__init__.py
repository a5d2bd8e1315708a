"""What a request means, read without torch: validation, text and stop strings, grammars, categories."""
