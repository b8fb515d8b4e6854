"""Tokens that something cheaper proposes and the model verifies."""
