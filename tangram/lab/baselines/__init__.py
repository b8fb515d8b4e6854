"""Engines that lack one of the engine's parts, or have another system's in its place, to compare
with.
"""
