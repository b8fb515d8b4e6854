"""Measures speculation: `python -m bench.speculation serving|cpu|acceptance`.

`serving` measures on a GPU, `cpu` and `acceptance` on a CPU. Each writes raw figures to
bench/results; `python -m bench.render speculation` writes the tables of docs/speculation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench.speculation import acceptance, cpu_conversation, serving

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "serving": serving.main,
    "cpu": cpu_conversation.main,
    "acceptance": acceptance.main,
}


def main(arguments: Sequence[str]) -> None:
    """Run the measurement that the first of `arguments` names."""
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__)
        raise SystemExit(0 if arguments in (["-h"], ["--help"]) else 2)
    COMMANDS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
