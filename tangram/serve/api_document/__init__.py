"""What /openapi.json and /docs show."""
