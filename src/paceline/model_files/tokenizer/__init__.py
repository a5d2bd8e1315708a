"""Tokenizer, chat template, incremental detokenisation, and whether two tokenizers are the same."""
