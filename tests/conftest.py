"""What all tests share. It imports no torch: `make quick` runs tests that need none."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("tangram", deadline=None)
settings.load_profile("tangram")
