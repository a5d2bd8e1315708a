"""Commands that simulate clusters and size them."""
