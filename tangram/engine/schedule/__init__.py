"""Which rows the next step has, of which sequences. Integers only."""
