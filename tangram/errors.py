"""Every error Tangram raises on purpose.

TangramError ├── ConfigError      an engine option is wrong: names the field, the value and the
limit ├── RequestError     one request is wrong or can never fit (HTTP 400): the engine goes on ├──
OverloadError    a queue is full (HTTP 429): says which, and when to come back ├── MachineError
the machine had no room for what one request needs (HTTP 503): the engine goes on, try again ├──
EngineError      the engine's thread has died: whoever runs it should start it again ├──
ProfileError     a profile is damaged, stale or of another model: names the mismatch ├── ModelError
the model cannot be loaded, or would be served silently wrong └── IntegrityError   the cache's books
do not add up: a bug in Tangram, never the user's fault
"""

from __future__ import annotations


class TangramError(Exception):
    """The root of the tree."""


class ConfigError(TangramError):
    """An engine option is out of range or contradicts another one."""


class RequestError(TangramError):
    """One request cannot be served; nothing else is affected.

    `field` is the request field to blame, as the client spelled it.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class OverloadError(TangramError):
    """One request too many waits; it may be sent again after `retry_after_s` seconds. `code` names
    the queue.
    """

    def __init__(self, message: str, retry_after_s: int, code: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after_s, self.code = retry_after_s, code


class MachineError(TangramError):
    """What one request needs besides the engine could not be had just now, whatever the request
    says.
    """


class EngineError(TangramError):
    """The engine has stopped by itself."""


class ProfileError(TangramError):
    """A profile cannot be used with this model or these options."""


class ModelError(TangramError):
    """The model cannot be loaded or would be silently wrong."""


class IntegrityError(TangramError):
    """The cache's books do not add up."""
