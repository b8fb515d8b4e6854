"""Writes docs/options.md from `EngineConfig`: `python -m tools.options_page`."""

from __future__ import annotations

from pathlib import Path

from tangram.config import CHOICES, OPTIONS, EngineConfig, OptionGroup

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """# Options of the engine

`tangram serve --max-num-seqs 64` and `LLM(max_num_seqs=64)` mean the same. `tangram serve --help`
also lists the options of the server itself. This page is written by `python -m tools.options_page`.
"""


def render() -> str:
    """The page: a table for each group of options."""
    groups = dict.fromkeys(option.group for option in OPTIONS.values())
    return HEAD + "".join(map(_table, groups))


def _table(group: OptionGroup) -> str:
    rows = [_row(name) for name, option in OPTIONS.items() if option.group is group]
    head = f"\n## {group.value}\n\n| option | default | meaning |\n|---|---|---|\n"
    return head + "".join(rows)


def _row(name: str) -> str:
    option, default = OPTIONS[name], getattr(EngineConfig, name)
    shown = option.unset or (f"`{default}`" if default not in ((), None) else "none")
    choices = f" (`{'`, `'.join(CHOICES[name])}`)" if name in CHOICES else ""
    alone = "; `serve` and `deploy` only" if option.served_alone else ""
    return f"| `{name}`{choices} | {shown} | {option.text}{alone} |\n"


if __name__ == "__main__":
    PAGE.write_text(render())
