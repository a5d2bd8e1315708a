"""The rows of a verification pass: the context of each row, its noise, and the processing of its logits."""
