"""Tangram's KV cache in an unmodified vLLM: budgets a head and chunk, with vLLM's prefix cache."""
