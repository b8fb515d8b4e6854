"""Forward passes: what the host says of one, and how the device runs it."""
