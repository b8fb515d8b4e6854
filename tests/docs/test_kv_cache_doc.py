"""The examples of docs/kv-cache.md print what the code prints: they are one Python session."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "kv-cache.md"


def test_the_examples_of_the_layout_document_hold() -> None:
    blocks = re.findall(
        r"^```pycon\n(.*?)^```$", DOCUMENT.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    session = doctest.DocTestParser().get_doctest(
        "\n".join(blocks), {}, DOCUMENT.name, str(DOCUMENT), 0
    )
    report: list[str] = []
    outcome = doctest.DocTestRunner(verbose=False).run(session, out=report.append)
    assert outcome.attempted == sum(block.count(">>> ") for block in blocks) > 0
    assert outcome.failed == 0, "".join(report)
