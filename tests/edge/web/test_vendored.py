"""The page's files: modules that a browser can read, and libraries as npm has them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.edge.web.browser import ROOT, STATIC

VENDOR = STATIC / "vendor"
SITE_VENDOR = ROOT / "docs" / "vendor"
DOCS = ROOT / "tangram" / "serve" / "api_document" / "docs"
OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "network")
MODULES = sorted(
    path
    for folder in (STATIC, DOCS)
    for path in folder.rglob("*.js")
    if folder / "vendor" not in path.parents and path.is_file()
)


@pytest.mark.parametrize(
    "vendor", [VENDOR, DOCS / "vendor", SITE_VENDOR], ids=["page", "docs", "site"]
)
def test_vendored_files_are_those_of_the_list_with_their_licences(vendor: Path) -> None:
    listed = json.loads((vendor / "packages.json").read_text())
    wanted = {name: digest for package in listed for name, digest in package["files"].items()}
    found = {
        path.relative_to(vendor).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.rglob("*")
        if path.is_file() and path.name != "packages.json"
    }
    assert found == wanted
    folders = {name.partition("/")[0] for name in found}
    assert {name for name in found if name.endswith("/LICENSE")} == {
        f"{folder}/LICENSE" for folder in folders
    }
    assert all(package["version"] and package["license"] for package in listed)


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here to ask packages of")
def test_vendored_files_equal_their_packages() -> None:
    command = [sys.executable, "-m", "tools.vendor_page", "--check"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if ended.returncode and any(sign in ended.stderr for sign in OFFLINE):
        pytest.skip(f"npm's registry cannot be reached: {ended.stderr.strip().splitlines()[0]}")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here to parse modules")
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_modules_can_be_parsed(module) -> None:
    ended = subprocess.run(
        ["node", "--check", "--input-type=module"],
        input=module.read_text(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr


def test_pages_name_no_other_host_and_have_nothing_inline() -> None:
    for page in (*STATIC.glob("**/*.html"), *DOCS.glob("*.html")):
        text = page.read_text()
        assert not re.search(r"(src|href)=\"(https?:)?//", text), page
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), page
