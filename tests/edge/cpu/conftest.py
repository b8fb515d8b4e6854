"""The models that these tests share with those of the engine."""

from __future__ import annotations

from tests.core.cpu.conftest import adopt_tiny as adopt_tiny
from tests.core.cpu.conftest import folder as folder
from tests.core.cpu.conftest import loaded as loaded
from tests.core.cpu.conftest import small_llm as small_llm
from tests.core.cpu.conftest import tokenizer as tokenizer
