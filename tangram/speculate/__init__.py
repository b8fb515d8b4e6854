"""Speculative decoding on the host: what is drafted, how much, and what of it the model accepts."""
