"""Tokenizer, chat template and incremental detokenisation."""
