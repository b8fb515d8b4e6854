"""What Tangram adds to the embedded model, whose file has neither: sampling defaults, and tools.

Its template shows no tools. This one renders the same text without them, and with them shows tools
and calls in the form of Hermes. The model was not trained on that form.
"""

from __future__ import annotations

from typing import Final

from tangram.types import SamplingValues

# As in the examples of its authors. `python -m bench.sampling_defaults` measures it beside others.
SAMPLING: Final = SamplingValues(temperature=0.2, top_p=0.9)
TEMPLATE: Final = """
{%- set greeting = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -%}
{%- set has_system = messages[0]['role'] == 'system' -%}
{%- set turns = messages[1:] if has_system else messages -%}
{{- '<|im_start|>system\\n' + (messages[0]['content'] if has_system else greeting) -}}
{%- if tools -%}
  {{- '\\n\\nYou can call functions. These are there:\\n' -}}
  {%- for tool in tools -%}
    {{- tool['function'] | tojson + '\\n' -}}
  {%- endfor -%}
  {{- 'Call one like this:\\n<tool_call>\\n' -}}
  {{- '{"name": "its name", "arguments": {"argument": "value"}}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in turns -%}
  {%- if message['role'] == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
  {%- else -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
    {%- for call in message['tool_calls'] or [] -%}
      {{- '\\n' if message['content'] or not loop.first -}}
      {{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson -}}
      {{- ', "arguments": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
