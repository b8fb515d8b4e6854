"""Measurements of the engine and comparisons with others. No serving package imports this one."""
