"""Prints which build of PyTorch pip will install, and its size, before the download.

`python tools/torch_build.py REQUIREMENT [PIP OPTIONS]` asks pip itself, so it finds the same build
in the public index, a named index, or a folder of wheels in pip's configuration. It needs no
package but pip.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

# On x86-64 Linux, of PyTorch 2.13 with all that it requires.
_CUDA_GB, _CPU_GB = (2.9, 4.8), (0.2, 0.7)
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def describe(wheel: dict[str, Any]) -> str:
    """The message about `wheel`, the entry of PyTorch in pip's report."""
    required = wheel["metadata"].get("requires_dist", [])
    cuda = sys.platform == "linux" and any(name.startswith(("cuda", "nvidia")) for name in required)
    fetched, kept = _CUDA_GB if cuda else _CPU_GB
    url = urlsplit(wheel["download_info"]["url"])
    place = url.netloc or unquote(str(PurePosixPath(url.path).parent))
    build = (
        f"PyTorch {wheel['metadata']['version']}, the {'CUDA' if cuda else 'CPU'} build, from "
        f"{place}"
    )
    message = f"{build}: {fetched} GB to download with its requirements, {kept} GB on disk."
    if cuda:
        message += (
            f"\nThe build without GPU support takes {_CPU_GB[0]} and {_CPU_GB[1]} GB: make "
            f"TORCH_INDEX={_CPU_INDEX}"
        )
    return message


def main() -> None:
    """Ask pip, which downloads metadata only."""
    asked = ["install", "--dry-run", "--no-deps", "--quiet", "--report", "-", *sys.argv[1:]]
    report = subprocess.run(
        [sys.executable, "-m", "pip", *asked], stdout=subprocess.PIPE, check=True
    ).stdout
    chosen = json.loads(report)["install"]
    print(
        describe(chosen[0])
        if chosen
        else "PyTorch stays as it is: for another build, make clean first",
        flush=True,
    )


if __name__ == "__main__":
    main()
