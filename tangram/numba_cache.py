"""Compile Python for the CPU, with a copy on disk for the next process where possible.

The process that compiles computes the same bits as those that load the copy.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from llvmlite.binding import Linkage
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

_log = logging.getLogger(__name__)


def compile_kept(
    *, notice: str | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile the decorated function by `numba.njit(**options)`, with Numba's cache on disk.

    `notice` is logged as a warning before compilation, to explain a slow start. A folder that is
    not writable, a full disk or a damaged file cause only a warning and a new compilation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher: Any = njit(pipeline_class=_OwningCompiler, **options)(function)
        try:
            # The same as `cache=True`, except for errors.
            dispatcher._cache = _ForgivingCache(function, notice)
        except RuntimeError:
            _warn("there is no folder to write it to, set NUMBA_CACHE_DIR to one")
        return dispatcher  # type: ignore[no-any-return]

    return decorate


class _OwningCompiler(Compiler):
    """Numba's compiler, whose code is `_OwnedCode`."""

    def compile_extra(self, func: Any) -> Any:
        """The code of `func`."""
        codegen = self.state.targetctx.codegen()
        self.state.library = _OwnedCode(codegen, func.__qualname__)  # type: ignore[no-untyped-call]
        self.state.library.enable_object_caching()
        return super().compile_extra(func)  # type: ignore[no-untyped-call]


class _OwnedCode(JITCodeLibrary):
    """Machine code that calls its own copies of other compiled functions.

    Numba's copies are weak symbols: what is in memory under the same names replaces them, in the
    process that compiles the functions compiled alone. Where sums may be reordered, these have
    another order, so other bits.
    """

    def _finalize_final_module(self) -> None:
        module = self._final_module
        copies = [each for each in module.functions if each.linkage is Linkage.linkonce_odr]
        for copy in copies:
            copy.linkage = "internal"
        super()._finalize_final_module()  # type: ignore[no-untyped-call]
        shared = self._get_module_for_linking()  # type: ignore[no-untyped-call]
        for copy in copies:  # once each in the code of callers
            shared.get_function(copy.name).linkage = "linkonce_odr"


class _ForgivingCache(FunctionCache):
    """Numba's cache of one function. Its file errors do not reach the function's callers."""

    def __init__(self, function: Callable[..., Any], notice: str | None) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._notice = notice

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for arguments of types `sig`; None if there is none that can be read."""
        kept = None
        try:
            kept = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except (OSError, EOFError, UnpicklingError) as error:
            self._warn(error)
        if kept is None and self._notice is not None:
            _log.warning(self._notice)
        return kept

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code `data` for arguments of types `sig`."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except (OSError, EOFError, UnpicklingError) as error:
            self._warn(error)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Code contains that of the functions it calls, so it depends on the files of these.

        Numba itself compares a file's time and size, which a replaced file may share.
        """
        key = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return *key, _hash_sources(Path(self._py_func.__code__.co_filename))

    def _warn(self, error: Exception) -> None:
        # The path in an error's text differs for each function.
        _warn(
            f"{error.strerror if isinstance(error, OSError) else 'a damaged file'} in "
            f"{self.cache_path}"
        )


@functools.cache
def _hash_sources(file: Path) -> str:
    """A hash of `file`, the files beside it, what they take from planners, and this file."""
    plans = (Path(__file__).parent / "plan" / name for name in ("loops.py", "records.py"))
    beside = file.parent.glob("*.py")
    sources = (path.read_bytes() for path in sorted({Path(__file__), *plans, *beside}))
    return hashlib.sha256(b"".join(sources)).hexdigest()


@functools.cache
def _warn(why: str) -> None:
    """Log each `why` once: a start compiles many functions."""
    _log.warning("compiled code could not be kept for the next start: %s", why)
