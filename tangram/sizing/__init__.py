"""How large a KV cache and a model's weights are, from configuration alone: no torch here."""
