"""Pages of the KV cache: who holds them, what prefixes they serve, and what is promised."""
