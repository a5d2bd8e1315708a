"""How many workers of each role a load needs."""
