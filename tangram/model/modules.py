"""Replacing modules of a loaded model: no object changes its class, and none gets a method."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from types import FunctionType
from typing import Any

from torch import nn


class CompiledPart:
    """Marks classes whose modules are compiled: several engines may use one model in turn."""


def replace_modules(
    model: nn.Module, chosen: Callable[[str, Any], bool], make: Callable[[str, Any], nn.Module]
) -> None:
    """Replace what is `chosen` of the parts of `model`, by name and module, by what `make` makes.

    Outer parts come first. A replaced part is released before the next one is made.
    """
    for name in [name for name, part in model.named_modules() if name and chosen(name, part)]:
        model.set_submodule(name, make(name, model.get_submodule(name)))


def derive(kind: type[nn.Module], *mixins: type, **members: Any) -> type[nn.Module]:
    """A class that is `kind` but for `mixins`, which come before it, and `members`."""
    made = type(kind.__name__, (*mixins, kind), {"__module__": kind.__module__})
    for name, member in members.items():  # now: Transformers' layers wrap what a class begins with
        setattr(made, name, member)
    return made


def remake(part: nn.Module, choose: Callable[[Any], type[nn.Module]]) -> nn.Module:
    """A module with all that `part` holds, of what `choose` derives from its class."""
    kind = choose(type(part))
    made = kind.__new__(kind)
    vars(made).update(vars(part))
    return made


def copy_function(function: Any) -> FunctionType:
    """`function` without its wrappers, with code of its own.

    torch.compile keeps graphs by the code of a function, and limits how many a code has. Past the
    limit it compiles nothing of it any more, and numbers are rounded in other places. All models of
    a class run the same code, so several engines in a process would reach the limit.
    """
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
