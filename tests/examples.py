"""How many examples a property is tried with: all in `make nightly`, a part in `make test`."""

from __future__ import annotations

from hypothesis import settings

NIGHTLY = "nightly"


def examples(count: int) -> int:
    """`count`, but for a quarter of it where no nightly run asks for all."""
    return count if settings.get_current_profile_name() == NIGHTLY else max(10, count // 4)
