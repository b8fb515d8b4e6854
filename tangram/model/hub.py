"""Files of the Hugging Face Hub, or why there are none, in bounded time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tangram.errors import ModelError

_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether `name` is OWNER/NAME, as the Hub allows it.

    Models without an owner, of the Hub's first years, are found under that of their makers.
    """
    if not _ID.fullmatch(name) or name.startswith("."):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def fetch_files(name: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """The folder with those files of model `name` that match one of `patterns`.

    `revision` is a commit; None is the newest. Without a network it is the folder that an earlier
    call has left: the Hub is asked without repeats, and a request ends after ten seconds. Raises
    `ModelError` with the reason if there is no such folder.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the network has many kinds of errors, and each ends here
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ModelError(
            f"model {name!r}: there is no such folder, and it cannot be fetched from Hugging Face "
            f"({reason}): give a folder with its config.json, or a GGUF file"
        ) from error
