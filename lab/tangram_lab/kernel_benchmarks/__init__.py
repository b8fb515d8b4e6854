"""Measures the decode schedules on this GPU, and writes a policy that chooses between them."""
