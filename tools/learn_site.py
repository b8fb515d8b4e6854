"""/learn as files for any web host: the page, and all that it loads.

The chapters ask no server for anything: their data is recorded. `make site` puts these files into
the folder `learn` of the site. Modules are found by their imports, so nothing else is copied.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "tangram" / "web" / "static"
PAGE = STATIC / "learn" / "index.html"
FOLDER = "learn"
_LINKED = re.compile(r'(?:href|src)="page/([^"]+)"')
_IMPORTED = re.compile(r'(?:from ?|import\()\s*"(\.[^"]+)"')


def site_files() -> dict[str, Path]:
    """Where each file lies in the site, and the file of the tree."""
    modules = [STATIC / name for name in _LINKED.findall(PAGE.read_text())]
    modules += sorted(PAGE.parent.glob("chapters/*.js"))
    found: set[Path] = set()
    while modules:
        module = modules.pop().resolve()
        if module not in found:
            found.add(module)
            if module.suffix in (".js", ".mjs"):
                imported = _IMPORTED.findall(module.read_text())
                modules += [module.parent / name for name in imported]
    vendor = STATIC / "vendor"
    packages = {path.parent for path in found if vendor in path.parents}
    licences = {folder / "LICENSE" for folder in packages if (folder / "LICENSE").is_file()}
    data = set((PAGE.parent / "data").glob("*.json"))
    files = {f"{FOLDER}/index.html": PAGE}
    for path in sorted(found | licences | data):
        files[f"{FOLDER}/page/{path.relative_to(STATIC).as_posix()}"] = path
    return files


# Links of pages to files of the tree that the site has, too.
LINKS = {PAGE.relative_to(ROOT).as_posix(): f"{FOLDER}/index.html"}
