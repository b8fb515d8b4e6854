"""The names that users write: `python -m tests.public_names` records them for a test to compare.

A name that is recorded stays: one that is renamed goes on as a deprecated alias. So names that are
gone are refused, unless `--drop` says that they are meant to go.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from prometheus_client.core import Metric

import tangram
from tangram.cli import app as commands
from tangram.cli.lab import LabCommand
from tangram.link.linked_engine import LinkedEngine
from tangram.serve.http import build_app
from tangram.serve.observability.vllm_names import VllmNames
from tangram.serve.options import Visibility
from tangram.web.access import Access
from tangram.web.api import CacheWeb
from tests.edge.wire.watched_engine import ObservedFakeEngine
from tools.vllm_page import make_distinct_metrics

RECORD = Path(__file__).parent / "fixtures" / "public_names.json"
_METHODS = {"get", "post", "put", "patch", "delete"}


def list_public_names() -> dict[str, list[str]]:
    """By kind, sorted: Python's names, commands, options, endpoints, request fields, metrics."""
    engine = ObservedFakeEngine()
    linked = LinkedEngine(engine)
    web = CacheWeb(linked, Access(Visibility.auto, "127.0.0.1"))
    app = build_app(linked, served_model_name="model", web=web)
    groups = {
        "python": tangram.__all__,
        "options": _list_options(typer.main.get_command(commands), "tangram"),
        "endpoints": _list_endpoints(app.openapi()),
        "fields": _list_fields(app.openapi()),
        "metrics": _list_metrics(),
    }
    return {kind: sorted(set(names)) for kind, names in groups.items()}


def _list_options(command: Any, path: str) -> Iterator[str]:
    if isinstance(command, LabCommand):
        command = command.inner
    yield path
    for param in command.params:
        for name in (*param.opts, *param.secondary_opts):
            yield f"{path} {name if name.startswith('-') else name.upper()}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from _list_options(inner, f"{path} {name}")


def _list_endpoints(document: dict[str, Any]) -> Iterator[str]:
    for path, operations in document["paths"].items():
        yield from (f"{method.upper()} {path}" for method in operations if method in _METHODS)


def _list_fields(document: dict[str, Any]) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        yield from (f"{name}.{field}" for field in schema.get("properties", {}))


def _list_metrics() -> Iterator[str]:
    metrics = make_distinct_metrics()
    for family in (*metrics.registry.collect(), *VllmNames(metrics, "model").collect()):
        yield _describe(family)


def _describe(family: Metric) -> str:
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    return f"{family.type} {family.name}{{{', '.join(sorted(labels))}}}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drop", action="store_true", help="drop recorded names that are gone")
    names, recorded = list_public_names(), json.loads(RECORD.read_text())
    gone = [one for kind, old in recorded.items() for one in old if one not in names.get(kind, ())]
    if gone and not parser.parse_args().drop:
        sys.exit(f"recorded names are gone: {', '.join(gone)}; keep an alias, or give --drop")
    RECORD.write_text(json.dumps(names, indent=1) + "\n")
