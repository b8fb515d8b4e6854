"""Kernels run on the GPU where there is one, and in Triton's interpreter, on small shapes, where
none is.

Import this before Triton, which Transformers imports.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
# What repeats a kernel with other numbers takes a GPU a second and the interpreter ten.
interpreter_nightly = (pytest.mark.nightly,) if INTERPRETED else ()


def interpreter_few(cases: Sequence[Any], *few: Any) -> list[Any]:
    """All of `cases` as parameters of a test; where kernels are interpreted, all but `few` of them
    are `nightly`.
    """
    assert {*few} <= {*cases}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in few else interpreter_nightly,
        )
        for case in cases
    ]


def _replace_once(interpreter: ModuleType) -> None:
    """Let the interpreter replace Triton's functions now, and not at every call of a function.

    It inspects the whole language each time, which takes longer than what the kernel computes.
    """
    everywhere = {"tl": interpreter.tl, "core": interpreter.tl.core}
    interpreter._patch_lang(SimpleNamespace(__globals__=everywhere))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


def _keep_dtypes(interpreter: ModuleType) -> None:
    """Let the interpreter make its table of dtypes once for each, and not at every operation."""
    convert, kept = interpreter._get_np_dtype, dict[str, Any]()

    def convert_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in kept:
            kept[name] = convert(dtype.scalar)
        return kept[name]

    interpreter._get_np_dtype = convert_once


if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _replace_once(interpreter)
    _keep_dtypes(interpreter)
