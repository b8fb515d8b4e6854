"""Measures this GPU and writes down which schedule suits which step."""
