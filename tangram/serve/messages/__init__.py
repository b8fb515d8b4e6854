"""POST /v1/messages, Anthropic's API, as chat: bodies and answers."""
