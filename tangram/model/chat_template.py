"""Chat templates that users give, in place of the model's own."""

from __future__ import annotations

from tangram.errors import ConfigError
from tangram.foreign_files import expand_home

_MOST_BYTES = 1 << 20


def read_template(option: str) -> str:
    """The text of the file `option`. Raises `ConfigError` if it cannot be a chat template."""
    try:
        with expand_home(option).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _explain(option, f"which cannot be read ({reason})") from error
    if len(content) > _MOST_BYTES:
        raise _explain(option, f"which has more than {_MOST_BYTES} bytes")
    if not text.strip():
        raise _explain(option, "which is empty")
    return text


def _explain(option: str, fault: str) -> ConfigError:
    return ConfigError(
        f"chat_template is {option!r}, {fault}: give a file with a chat template in Jinja"
    )
