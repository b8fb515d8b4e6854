"""How much longer a text may become by the rules of a tokenizer's file.

The library applies such rules to a whole text at once: the memory must be bounded before that.
"""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

from tangram.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Unicode's own longest replacement has 18 characters, and real files have one or two beside it.
MOST_GROWTH = 100


def check_growth(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `ModelError` if rules of the tokenizer of model `name` may multiply a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for part in ("normalizer", "decoder"):
        rule = getattr(backend, part, None)
        growth = 1.0 if rule is None else measure_growth(json.loads(rule.__getstate__()))
        if growth > MOST_GROWTH:
            raise ModelError(
                f"model {name!r}: the {part} of its tokenizer makes a text up to {growth:,.0f} "
                f"times as long, the most served is {MOST_GROWTH}: take a tokenizer whose "
                f"replacements are short"
            )


def measure_growth(rule: dict[str, Any]) -> float:
    """By how much `rule`, of a tokenizer.json, multiplies the characters of a text at most.

    Counts replacements that the file itself spells, not those of Unicode or of letters' case.
    """
    match rule:
        case {"type": "Sequence"}:
            inner = rule.get("normalizers") or rule.get("decoders") or []
            return math.prod(map(measure_growth, inner))
        case {"type": "Replace", "content": content, "pattern": {"String": pattern}} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace", "content": content}:
            return 1.0 + len(content)  # an expression may match between two characters
        case {"type": "Prepend", "prepend": content}:
            return 1.0 + len(content)
        case {"type": "Precompiled", "precompiled_charsmap": table} if table:
            return _longest_replacement(base64.b64decode(table))
        case _:
            return 1.0


def _longest_replacement(table: bytes) -> float:
    """The longest text of SentencePiece's table: a tree of so many bytes, then texts and zeros."""
    tree_bytes = int.from_bytes(table[:4], "little")
    texts = table[4 + tree_bytes :].split(b"\0")
    return max(1.0, *(len(text.decode("utf-8", "replace")) for text in texts))
