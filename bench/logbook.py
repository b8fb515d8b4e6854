"""The prose that several measurements read: the document that the page begins with."""

from pathlib import Path

LOGBOOK = Path(__file__).parents[1] / "tangram" / "web" / "static" / "demo_document.md"
