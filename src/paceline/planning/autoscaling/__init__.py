"""Pools that follow their load: forecasts, decisions with reasons, and simple rules to compare with."""
