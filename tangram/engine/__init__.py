"""The engine: requests in, steps, tokens out."""
