"""Baselines: engines without one of the engine's parts, or with another system's part instead."""
