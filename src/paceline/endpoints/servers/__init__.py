"""Servers as endpoints: what each kind offers and how it is called."""
