"""Paceline: speculative decoding for LLM serving, faster and not a word different."""
