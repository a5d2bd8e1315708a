"""Drafting and verification: proposers, drafts, acceptance rules, depth."""
