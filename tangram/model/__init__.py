"""Models of Transformers, with attention and sealing of our own."""
