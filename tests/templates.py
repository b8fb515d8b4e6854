"""Chat templates of models that know tools, cut down to what matters: how tools are shown and how
calls are written.
"""

from __future__ import annotations

HERMES = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
You may call functions, whose signatures are within <tools></tools>:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call, return a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501

LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' and tools is not none and loop.first %}<|im_start|>user
Given the following functions, please respond with a JSON for a function call.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{{ message.content }}<|im_end|>
{% elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|im_start|>assistant
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>ipython
{{ message.content | tojson }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

XML = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<function={{ call.function.name }}>
{%- for name, value in call.function.arguments.items() %}<parameter={{ name }}>
{{- value }}</parameter>{% endfor %}
</function>{% endfor %}
{% endfor %}"""

# The ends of Qwen3's and GPT-OSS's, whose requests may say how much is thought.
QWEN3 = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

GPT_OSS = """{%- macro build_system_message() %}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "Reasoning: " + reasoning_effort + "\\n\\n" }}{{- model_identity | default("") }}
{%- endmacro %}
{{- "<|im_start|>system\\n" }}{{- build_system_message() }}{{- "<|im_end|>" }}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>
{% endfor %}"""
