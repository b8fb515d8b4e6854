"""Every error that Tangram raises on purpose.

Each message names the cause and says what to do.

    TangramError
    ├── ConfigError      an engine option is wrong: names the field, the value and the limit
    ├── RequestError     one request is wrong or can never fit (HTTP 400): the engine goes on
    ├── OverloadError    a queue is full (HTTP 429): says which, and when to come back
    ├── MachineError     the machine lacks resources for a request (HTTP 503): try again
    ├── EngineError      the engine's thread has died: start it again
    ├── ProfileError     a profile is damaged, stale or of another model: names the mismatch
    ├── ModelError       the model cannot be loaded, or would be served silently wrong
    └── IntegrityError   the cache's page accounting is wrong: a bug in Tangram
"""

from __future__ import annotations


class TangramError(Exception):
    """The root of the tree."""


class ConfigError(TangramError):
    """An engine option is out of range or contradicts another one."""


class RequestError(TangramError):
    """One request cannot be served; nothing else is affected.

    `field` is the wrong request field, as the client spelled it.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class OverloadError(TangramError):
    """Too many requests wait. The client may try again after `retry_after_s` seconds.

    `code` names the queue.
    """

    def __init__(self, message: str, retry_after_s: int, code: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after_s, self.code = retry_after_s, code


class MachineError(TangramError):
    """The machine could not provide resources for one request, whatever the request says."""


class EngineError(TangramError):
    """The engine has stopped by itself."""


class ProfileError(TangramError):
    """A profile cannot be used with this model or these options."""


class ModelError(TangramError):
    """The model cannot be loaded or would be silently wrong."""


class IntegrityError(TangramError):
    """The cache's page accounting is wrong."""
