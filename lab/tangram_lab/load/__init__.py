"""Engines under load, and where the time of a step goes."""
