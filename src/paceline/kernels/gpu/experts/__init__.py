"""Routed experts: routing, and a product with another matrix for each group of rows."""
