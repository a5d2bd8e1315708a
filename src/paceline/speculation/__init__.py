"""Drafting and verification: the interface of proposers, drafts, acceptance rules."""
