"""Commands that train drafts: `train`, `learn` and `export`."""
