"""What all tests share. It imports no torch: `make quick` runs tests that need none."""

from __future__ import annotations

import signal

from hypothesis import settings

# A run in the background of a shell ignores Ctrl-C, and so would the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("tangram", deadline=None)
settings.load_profile("tangram")
