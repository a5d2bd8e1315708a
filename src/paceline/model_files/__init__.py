"""What the files of a model say, read without torch: metadata, tokenizer, chat template, fingerprint."""
