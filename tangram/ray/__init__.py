"""Replicas by Ray Serve: `serve run tangram.ray:app`. Needs `pip install 'tangram-serve[ray]'`."""

from tangram.ray.application import app

__all__ = ["app"]
