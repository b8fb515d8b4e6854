"""Every error Tangram raises on purpose.

TangramError
├── ConfigError      an engine option is wrong: names the field, the value and the limit
├── RequestError     one request is wrong or can never fit (HTTP 400): the engine goes on
├── OverloadError    a queue is full (HTTP 429): says which, and when to try again
├── MachineError     the machine lacked memory or processes for one request (HTTP 503)
├── EngineError      the engine's thread has died: start the process again
├── ProfileError     a profile is damaged, stale or of another model: names the mismatch
├── ModelError       the model cannot be loaded, or would be served with wrong results
└── IntegrityError   the cache's accounts do not add up: a bug in Tangram
"""

from __future__ import annotations

from collections.abc import Callable

# The text of an error as a function of the name of the field to blame.
Wording = Callable[[str], str]


class TangramError(Exception):
    """The root of the tree."""


class ConfigError(TangramError):
    """An engine option is out of range or contradicts another."""


class RequestError(TangramError):
    """One request cannot be served; nothing else is affected.

    `field` is the request field to blame. A text that names the field is a function of that name,
    so `rename` can give the field another name.
    """

    def __init__(self, text: str | Wording, field: str) -> None:
        super().__init__(text if isinstance(text, str) else text(field))
        self._text, self.field = text, field

    def rename(self, field: str, spoken: str = "") -> RequestError:
        """The same error about `field`, which the text calls `spoken` if that is given."""
        if isinstance(self._text, str):
            return RequestError(self._text, field)
        return RequestError(self._text(spoken or field), field)


class OverloadError(TangramError):
    """A queue is full. The request may be sent again after `retry_after_s` seconds.

    `code` names the queue.
    """

    def __init__(self, message: str, retry_after_s: int, code: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after_s, self.code = retry_after_s, code


class MachineError(TangramError):
    """The machine lacked memory or processes for one request, whatever the request says."""


class EngineError(TangramError):
    """The engine has stopped by itself."""


class ProfileError(TangramError):
    """A profile cannot be used with this model or these options."""


class ModelError(TangramError):
    """The model cannot be loaded or would be silently wrong."""


class IntegrityError(TangramError):
    """The cache's accounts do not add up."""
