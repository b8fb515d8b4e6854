"""What a chat template can be told besides the conversation: `enable_thinking` of Qwen3, say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tangram.limits import TEMPLATE_NAMES

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from transformers import PreTrainedTokenizerBase


class _Generation(Extension):
    """The tag with which some templates mark answers for training: what is inside counts as usual."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_options(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The variables that every chat template of `tokenizer` reads and that are for a request to set."""
    found = tokenizer.chat_template or {}
    read = [_read(template) for template in ([found] if isinstance(found, str) else found.values())]
    own = TEMPLATE_NAMES.union(tokenizer.special_tokens_map)
    return frozenset.intersection(*read) - own if read else frozenset()


def _read(template: str) -> frozenset[str]:
    environment = ImmutableSandboxedEnvironment(extensions=_EXTENSIONS)
    try:
        return frozenset(find_undeclared_variables(environment.parse(template)))
    except TemplateError:  # a conversation will say so
        return frozenset()


_EXTENSIONS: Iterable[type[Extension]] = (_Generation, loopcontrols)
