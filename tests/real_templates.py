"""The chat templates of real models, as their makers ship them.

TRL keeps them, letter for letter, to tell models apart (`trl/chat_templates/README.md` names the
source of each). Nothing of it is imported: only the files are read. Those that it does not have are
in `fixtures/templates`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_KEPT = Path(__file__).parent / "fixtures" / "templates"


def real_template(name: str) -> str:
    """The template `name` of our folder or TRL's, `qwen3` say."""
    if (kept := _KEPT / f"{name}.jinja").exists():
        return kept.read_text(encoding="utf-8")
    package = find_spec("trl")
    assert package is not None and package.submodule_search_locations, (
        "the templates of real models are missing: pip install --no-deps trl (see CONTRIBUTING.md)"
    )
    folder = Path(package.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


MISTRAL_LISTS = {
    name: real_template(name) for name in ("mistral-7b-instruct-v0.3", "mistral-nemo-instruct-2407")
}
# Of ERNIE 4.5 Thinking, after what those who serve and train it write: no package has it.
ERNIE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if loop.first and tools %}<tool_list>{{ tools | tojson }}</tool_list>
{% endif %}{% if m.role != 'assistant' %}{{ m.content }}{% else %}
{%- if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{% if m.content %}<response>
{{ m.content }}
</response>
{% endif %}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{% endfor %}{% endif %}<|im_end|>

{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
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
