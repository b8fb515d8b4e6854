"""The chat templates of real models, as their makers ship them.

TRL keeps them, letter for letter, to tell models apart (`trl/chat_templates/README.md` names the
source of each). Nothing of it is imported: only the files are read.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def real_template(name: str) -> str:
    """The template `name` of TRL's folder, `qwen3` say."""
    package = find_spec("trl")
    assert package is not None and package.submodule_search_locations, (
        "the templates of real models are missing: pip install --no-deps trl (see CONTRIBUTING.md)"
    )
    folder = Path(package.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


_MISTRAL = Path(__file__).parent / "fixtures" / "templates"  # TRL has none of Mistral's
MISTRAL_LISTS = {
    name: (_MISTRAL / f"{name}.jinja").read_text(encoding="utf-8")
    for name in ("mistral-7b-instruct-v0.3", "mistral-nemo-instruct-2407")
}
# Of Llama 2 chat, without its system prompt: TRL has none.
LLAMA2 = """{%- for m in messages %}
{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
# The newer form, of Mistral Small 3.2, cut down to how tools are shown and calls are written.
_IDS = "{%- if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
_NEWER = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}CALLS{{ eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""
MISTRAL_NAMED = _NEWER.replace(
    "CALLS",
    "{% for c in m.tool_calls %}"
    + _IDS
    + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)
