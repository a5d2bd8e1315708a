"""Loading of drafts: folders, heads, and the exchange of a running draft."""
