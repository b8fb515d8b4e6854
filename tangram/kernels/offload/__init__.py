"""Host memory behind a pool: the forms of entries there, and the copies out and back."""
