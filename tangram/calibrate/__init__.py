"""How profiles are made: texts, the scores of their chunks, and what each head needs of them."""
