"""How many entries each head keeps, and which."""
