"""What a command can see without torch, whose import takes seconds: said before them, in a line."""

from __future__ import annotations

from rich.console import Console

from tangram.config import EngineConfig, cache_folder
from tangram.model.source import check_source

_err = Console(stderr=True)


def check_start(config: EngineConfig) -> None:
    """Raise `ModelError` where the model is not there; print a line where the cache cannot be read."""
    check_source(config.model)
    _check_cache_folder()


def _check_cache_folder() -> None:
    """It costs time at each start and nothing else, so nothing is refused."""
    for name in ("models", "profiles"):
        folder = cache_folder() / name
        try:
            next(folder.iterdir(), None)
        except FileNotFoundError:  # it will be made
            continue
        except OSError as error:
            _err.print(
                f"[yellow]warning:[/yellow] cache folder {folder} cannot be read ({error.strerror}): "
                "what it is for is made anew at each start; set TANGRAM_CACHE to another folder",
                highlight=False,
                soft_wrap=True,
            )
            return
