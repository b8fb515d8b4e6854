"""Copies the libraries of the pages and the site from npm: `python -m tools.vendor_page`.

`PAGE`, `DOCS` and `SITE` name each package, its version, and the files that are taken. All of them
are published as a browser reads them, so nothing is built here. One line is edited: Preact's hooks
name their package, which a browser cannot find, so `edits` puts the path of the file there.
Languages of highlight.js come from its package for browsers: the other one has no ES modules.

To renew a library, change its version and run the script. `--check` downloads the same packages,
writes nothing, and says which files differ. Both need `npm`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = "packages.json"
LANGUAGES = (
    *("bash", "c", "cpp", "css", "diff", "go", "java", "javascript", "json", "markdown"),
    *("python", "rust", "sql", "typescript", "xml", "yaml"),
)


@dataclass(frozen=True)
class Package:
    """One npm package: what is taken of it, by name inside it, to a name in `folder`."""

    name: str
    version: str
    folder: str
    files: Mapping[str, str]
    edits: Mapping[str, tuple[str, str]] = field(default_factory=dict)


PAGE = (
    Package(
        "preact",
        "11.2.0",
        "preact",
        {"dist/preact.mjs": "preact.mjs", "hooks/dist/hooks.mjs": "hooks.mjs"},
        {"hooks.mjs": ('from"preact"', 'from"./preact.mjs"')},
    ),
    Package("htm", "3.1.1", "htm", {"dist/htm.mjs": "htm.mjs"}),
    Package(
        "uplot",
        "1.6.32",
        "uplot",
        {"dist/uPlot.esm.js": "uPlot.esm.js", "dist/uPlot.min.css": "uPlot.min.css"},
    ),
    Package(
        "markdown-it",
        "15.0.3",
        "markdown-it",
        {"dist/browser/markdown-it.esm.min.mjs": "markdown-it.mjs"},
    ),
    Package("dompurify", "3.4.18", "dompurify", {"dist/purify.es.mjs": "purify.mjs"}),
    Package(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "highlight",
        {"es/core.min.js": "core.js"}
        | {f"es/languages/{name}.min.js": f"languages/{name}.js" for name in LANGUAGES},
    ),
)
DOCS = (
    Package(
        "swagger-ui-dist",
        "5.35.0",
        "swagger-ui",
        {
            "swagger-ui-bundle.js": "swagger-ui-bundle.js",
            "swagger-ui-bundle.js.LICENSE.txt": "swagger-ui-bundle.js.LICENSE.txt",
            "swagger-ui.css": "swagger-ui.css",
            "NOTICE": "NOTICE",
        },
    ),
)
# The site's theme would load it from another host.
SITE = (Package("mermaid", "11.17.2", "mermaid", {"dist/mermaid.min.js": "mermaid.min.js"}),)
PLACES = {
    ROOT / "tangram" / "web" / "static" / "vendor": PAGE,
    ROOT / "tangram" / "serve" / "api_document" / "docs" / "vendor": DOCS,
    ROOT / "docs" / "vendor": SITE,
}


def main() -> None:
    """Write the vendored files, or with `--check` compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    wanted = {vendor: collect(packages) for vendor, packages in PLACES.items()}
    if not check:
        for vendor, files in wanted.items():
            write(vendor, files)
        return
    wrong = [line for vendor, files in wanted.items() for line in compare(vendor, files)]
    if wrong:
        sys.exit(
            "\n".join([*wrong, "to write the files of the packages: python -m tools.vendor_page"])
        )
    print(f"{sum(map(len, wanted.values()))} files equal those of their packages")


def collect(packages: Sequence[Package]) -> dict[str, bytes]:
    """Path to content, as the packages have it, and the list of them."""
    wanted: dict[str, bytes] = {}
    listed = []
    for package in packages:
        archive = download(package)
        described, files = unpack(package, archive)
        wanted |= files
        listed.append(
            {
                "name": package.name,
                "version": package.version,
                "license": described["license"],
                "integrity": "sha512-"
                + base64.b64encode(hashlib.sha512(archive).digest()).decode(),
                "files": {path: hashlib.sha256(data).hexdigest() for path, data in files.items()},
            }
        )
    wanted[LIST] = (json.dumps(listed, indent=1) + "\n").encode()
    return wanted


def download(package: Package) -> bytes:
    """The package's archive, which npm has compared with the registry's checksum."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"{package.name}@{package.version}", "--silent"]
        subprocess.run([*command, "--pack-destination", folder], check=True, stdout=subprocess.PIPE)
        (archive,) = Path(folder).glob("*.tgz")
        return archive.read_bytes()


def unpack(package: Package, archive: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    """Its package.json, and the files that are taken with its licence."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:

        def read(name: str) -> bytes:
            member = tar.extractfile(f"package/{name}")
            if member is None:
                sys.exit(f"{package.name} {package.version} has no file {name}")
            return member.read()

        files = {taken: read(name) for name, taken in package.files.items()}
        for taken, (old, new) in package.edits.items():
            if files[taken].count(old.encode()) != 1:
                sys.exit(f"{package.name}: {taken} does not have {old!r} once, look at its edit")
            files[taken] = files[taken].replace(old.encode(), new.encode())
        files["LICENSE"] = read("LICENSE")
        described = json.loads(read("package.json"))
    return described, {f"{package.folder}/{taken}": data for taken, data in files.items()}


def write(vendor: Path, wanted: Mapping[str, bytes]) -> None:
    """Make the folder `vendor` hold exactly `wanted`."""
    for left_over in set(read_tree(vendor)) - set(wanted):
        (vendor / left_over).unlink()
    for path, data in wanted.items():
        (vendor / path).parent.mkdir(parents=True, exist_ok=True)
        (vendor / path).write_bytes(data)


def compare(vendor: Path, wanted: Mapping[str, bytes]) -> Iterator[str]:
    """A sentence for each file of the folder `vendor` that is not as in `wanted`."""
    there = read_tree(vendor)
    for path in sorted(set(there) | set(wanted)):
        if path not in there:
            yield f"{path} is missing"
        elif path not in wanted:
            yield f"{path} is in no package"
        elif there[path] != wanted[path]:
            yield f"{path} differs from its package"


def read_tree(vendor: Path) -> dict[str, bytes]:
    """Path under `vendor` to content, as it is now."""
    files = (path for path in vendor.rglob("*") if path.is_file())
    return {path.relative_to(vendor).as_posix(): path.read_bytes() for path in files}


if __name__ == "__main__":
    main()
