"""Functions that share no compiled graphs with others.

torch.compile keeps graphs by the code of a function, and limits how many a code has. Past the limit
it compiles nothing of it any more, and numbers are rounded in other places. All models of a class
run the same code, whatever their dtype, so several engines in a process would reach the limit.
"""

from __future__ import annotations

from inspect import unwrap
from types import FunctionType
from typing import Any


def copy_function(function: Any) -> FunctionType:
    """`function` without its wrappers, with code of its own."""
    inner: Any = unwrap(function)
    copy = FunctionType(
        inner.__code__.replace(),
        inner.__globals__,
        inner.__name__,
        inner.__defaults__,
        inner.__closure__,
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy
