"""POST /v1/responses as chat: bodies, answers, and the stored responses."""
