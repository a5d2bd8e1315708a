"""Training text: prompts, generated answers, hidden states."""
