"""What drafts inside graph steps."""
