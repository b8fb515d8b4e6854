"""Runs every family within a time budget, for a rented machine.

The families share the budget in the order given: each gets its part of the rest, so that a slow one
leaves time for the others. Each writes its results after every case. Unknown options go to every
family.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence

import torch

from bench.kernels import ablations, dense, living, pat, persistent, ragged
from bench.kernels.family import NO_DEVICE

FAMILIES = {
    "dense": (dense.main, 2),
    "pat": (pat.main, 4),
    "persistent": (persistent.main, 2),
    "living": (living.main, 2),
    "ragged": (ragged.main, 2),
    "ablations": (ablations.main, 1),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the families; one that fails is reported and the next one runs.

    Exits with 1 if any failed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--dry-run", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        raise SystemExit(2)
    end = time.monotonic() + options.budget_s
    chosen = options.families.split(",")
    failed = []
    for number, name in enumerate(chosen):
        run, weight = FAMILIES[name]
        share = weight / sum(FAMILIES[other][1] for other in chosen[number:])
        left = max(0.0, end - time.monotonic()) * share
        try:
            run([*rest, "--budget-s", f"{left:.0f}", *(["--dry-run"] if options.dry_run else [])])
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
