"""What steps and drafts cost, as measured."""
