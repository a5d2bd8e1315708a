"""Does speculation leave the text alone? Prompts are answered with it and without, and every round is checked afterwards."""
