"""The quick check: few questions that small models can answer, and a little real text. `tangram
eval --quick`.
"""

from __future__ import annotations

from tangram_lab.accuracy.passages import RealText
from tangram_lab.accuracy.sample_prompts import Questions

# Two of RULER's tasks that a model of 135 M parameters can answer; contexts of three chunks.
NEEDLES = Questions(
    "ruler", ("niah_single_3", "niah_multikey_1"), samples=6, context_tokens=1536, max_questions=2
)
TEXT = RealText(samples=3, context_tokens=1536)
RETENTIONS = (0.5, 0.25)
