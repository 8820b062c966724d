"""Chat templates with tools, in the layouts of published models, in words of our own.

The layouts are those of the templates that come with these checkpoints of the model hub:

- QWEN: Qwen/Qwen2.5-7B-Instruct and Qwen/Qwen3-8B (Hermes' tags; results in turns of the user).
- QWEN_CODER: Qwen/Qwen3-Coder-30B-A3B-Instruct (a tag for each argument).
- LLAMA: meta-llama/Llama-3.1-8B-Instruct (one call a message, results in the role `ipython`).
- MISTRAL: mistralai/Mistral-7B-Instruct-v0.3 (a list of calls, ids of nine characters).
- MISTRAL_CALL_ID: mistralai/Mistral-Small-3.2-24B-Instruct-2506 (`[CALL_ID]` and `[ARGS]`).
- MISTRAL_ARGS: mistralai/Devstral-Small-2507 and later (`[ARGS]` alone).
- DEEPSEEK: deepseek-ai/DeepSeek-V3 (a form that Quadriga does not know).
"""

QWEN = """
{%- if tools -%}
<|im_start|>system
Functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Call one with {"name": NAME, "arguments": OBJECT} between <tool_call> and </tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{ '<|im_start|>user' }}
{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string
    else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

QWEN_CODER = """
{%- if tools -%}
{{ '<|im_start|>system\\nFunctions:\\n<tools>' }}
{%- for tool in tools -%}
{{ '\\n<function>\\n<name>' + tool.function.name + '</name>' }}
{%- for key, about in (tool.function.parameters.properties or {}) | items -%}
{{ '\\n<parameter>\\n<name>' + key + '</name>\\n<type>' + (about.type | string) + '</type>' }}
{{- '\\n</parameter>' }}
{%- endfor -%}
{{ '\\n</function>' }}
{%- endfor -%}
{{ '\\n</tools>\\nCall: <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>' }}
{{- '\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items -%}
{{ '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

LLAMA = """
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) }}
{%- else -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls -%}
{%- if message.tool_calls | length != 1 -%}
{{ raise_exception('one call a message') }}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{ '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else -%}
{%- if tools is not none and message.role == 'user' and loop.last -%}
{{ 'Functions, called with {"name": NAME, "parameters": OBJECT}:\\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor -%}
{%- endif -%}
{{ message.content }}
{%- endif -%}
{%- endif -%}
{{ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

_MISTRAL = """
{%- if tools is not none -%}
{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif -%}
{%- for message in messages -%}
{%- for call in message.tool_calls or [] -%}
{%- if call.id is not defined or call.id | length != 9 -%}
{{ raise_exception('ids have nine characters') }}
{%- endif -%}
{%- endfor -%}
{%- if message.role == 'user' -%}
{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' -%}
RESULT
{%- elif message.tool_calls -%}
CALLS
{{ '</s>' }}
{%- else -%}
{{ ' ' + message.content + ('</s>' if message.role == 'assistant' else '') }}
{%- endif -%}
{%- endfor -%}
"""

MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls -%}
{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif -%}
{%- endfor -%}
{{ ']' }}""",
).replace(
    "RESULT",
    """{{ '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}""",
)

MISTRAL_CALL_ID = _MISTRAL.replace(
    "CALLS",
    """{%- for call in message.tool_calls -%}
{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- call.function.arguments | tojson }}
{%- endfor -%}""",
).replace(
    "RESULT",
    """{{ '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content }}
{{- '[/TOOL_RESULTS]' }}""",
)

MISTRAL_ARGS = _MISTRAL.replace(
    "CALLS",
    """{{ message.content }}
{%- for call in message.tool_calls -%}
{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor -%}""",
).replace("RESULT", "{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}")

DEEPSEEK = """
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages -%}
{{ message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<|tool_call_begin|>function<|tool_sep|>' + call.function.name + '\\n```json\\n' }}
{{- (call.function.arguments | tojson) + '\\n```<|tool_call_end|>' }}
{%- endfor -%}
{%- endfor -%}
"""
