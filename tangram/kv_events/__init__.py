"""Changes of the prefix cache as vLLM publishes them, for routers of others."""
