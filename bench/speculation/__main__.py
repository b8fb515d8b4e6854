"""Measures speculation: `python -m bench.speculation serving|vllm|cpu|acceptance`.

`serving` and `vllm` measure on a GPU, `cpu` and `acceptance` on a CPU. Each writes raw figures to
bench/results; `python -m bench.render speculation` writes the tables of docs/speculation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

# Where vLLM is installed the engine may not be importable, so only what is asked for is imported.
COMMANDS = {
    "serving": "serving",
    "vllm": "beside_vllm",
    "cpu": "cpu_conversation",
    "acceptance": "acceptance",
}


def main(arguments: Sequence[str]) -> None:
    """Run the measurement that the first of `arguments` names."""
    if not arguments or arguments[0] not in COMMANDS:
        print(__doc__)
        raise SystemExit(0 if arguments in (["-h"], ["--help"]) else 2)
    import_module(f"bench.speculation.{COMMANDS[arguments[0]]}").main(arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
