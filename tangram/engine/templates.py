"""Options of a chat template besides the conversation, such as `enable_thinking` of Qwen3."""

from __future__ import annotations

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
    """The tag with which some templates mark answers for training; its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_EXTENSIONS: tuple[type[Extension], ...] = (_Generation, loopcontrols)
_ASKS = ("defined", "undefined", "default", "d")


def template_options(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The variables that every chat template of `tokenizer` reads and that a request may set."""
    found = tokenizer.chat_template or {}
    read = [_read(template) for template in ([found] if isinstance(found, str) else found.values())]
    own = TEMPLATE_NAMES.union(tokenizer.special_tokens_map)
    return frozenset.intersection(*read) - own if read else frozenset()


def _read(template: str) -> frozenset[str]:
    environment = ImmutableSandboxedEnvironment(extensions=_EXTENSIONS)
    try:
        tree = environment.parse(template)
        read = find_undeclared_variables(tree)
    except TemplateError:  # rendering a conversation reports it
        return frozenset()
    # Jinja counts variables that are set in one branch only; a default for a missing variable is
    # different.
    written = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    asked = {
        each.node.name
        for each in tree.find_all((nodes.Test, nodes.Filter))
        if each.name in _ASKS and isinstance(each.node, nodes.Name)
    }
    return frozenset(read - (written - asked))
