"""The engine in one process and the HTTP API in others: both ends of what travels between them."""
