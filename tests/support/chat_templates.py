"""Chat templates that write tools, calls and results as those of each family of models do, in short form."""

from dataclasses import dataclass

from lightkv.router.text.tool_calls import deepseek, harmony, mistral

_CHATML_RESULTS = """
{%- elif message.role == "tool" %}
{%- if messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
{%- else %}{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
_CHATML_TOOLS = """
{%- if tools %}{{- "<|im_start|>system\\n" }}{%- for tool in tools %}{{- tool | tojson + "\\n" }}{%- endfor %}
{{- "<|im_end|>\\n" }}{%- endif %}"""

QWEN25 = f"""{_CHATML_TOOLS}
{{%- for message in messages %}}
{{%- if message.role == "assistant" and message.tool_calls %}}
{{{{- "<|im_start|>assistant" }}}}{{%- if message.content %}}{{{{- "\\n" + message.content }}}}{{%- endif %}}
{{%- for call in message.tool_calls %}}
{{{{- '\\n<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' }}}}
{{{{- call.function.arguments | tojson + "}}\\n</tool_call>" }}}}{{%- endfor %}}{{{{- "<|im_end|>\\n" }}}}
{_CHATML_RESULTS}"""

# As Qwen3's: reasoning stays only in the calls after the last question, and its switch writes an empty one.
QWEN3 = f"""{_CHATML_TOOLS}
{{%- for message in messages %}}
{{%- if message.role == "assistant" %}}
{{{{- "<|im_start|>assistant\\n" }}}}
{{%- if loop.last or message.reasoning_content %}}
{{{{- "<think>\\n" + (message.reasoning_content or "") + "\\n</think>\\n\\n" }}}}{{%- endif %}}
{{{{- message.content or "" }}}}
{{%- for call in message.tool_calls or [] %}}
{{%- if message.content or not loop.first %}}{{{{- "\\n" }}}}{{%- endif %}}
{{{{- '<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' }}}}
{{{{- call.function.arguments | tojson + "}}\\n</tool_call>" }}}}{{%- endfor %}}{{{{- "<|im_end|>\\n" }}}}
{_CHATML_RESULTS}
{{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}}
{{{{- "<think>\\n\\n</think>\\n\\n" }}}}{{%- endif %}}"""

_CODER_CALL = """
{{- "<tool_call>\\n<function=" + call.function.name + ">\\n" }}
{%- for name, value in call.function.arguments | items %}
{%- set is_dumped = value is mapping or (value is sequence and value is not string) %}
{{- "<parameter=" + name + ">\\n" + (value | tojson if is_dumped else value | string) }}
{{- "\\n</parameter>\\n" }}
{%- endfor %}{{- "</function>\\n</tool_call>" }}"""
QWEN3_CODER = f"""{_CHATML_TOOLS}
{{%- for message in messages %}}
{{%- if message.role == "assistant" and message.tool_calls %}}
{{{{- "<|im_start|>assistant" }}}}{{%- if message.content %}}{{{{- "\\n" + message.content }}}}{{%- endif %}}
{{%- for call in message.tool_calls %}}
{{{{- "\\n" }}}}{_CODER_CALL}{{%- endfor %}}{{{{- "<|im_end|>\\n" }}}}
{_CHATML_RESULTS}"""

# As Hermes 2 Pro's: arguments before the name, which no form of ours writes.
ARGUMENTS_FIRST = QWEN25.replace(
    """'\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}""",
    """'\\n<tool_call>\\n{"arguments": ' }}""",
).replace(
    """call.function.arguments | tojson + "}\\n</tool_call>" }}""",
    """call.function.arguments | tojson + ', "name": "' + call.function.name + '"}\\n</tool_call>' }}""",
)

LLAMA3 = """{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCalls have parameters." }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) + "\\n\\n" }}{%- endfor %}{{- "<|eot_id|>" }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception("one call at once") }}{%- endif %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson + "}<|eot_id|>" }}
{%- elif message.role == "tool" %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + {"output": message.content} | tojson + "<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}"""

_MISTRAL = """[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- for message in messages %}
{%- if message.role == "user" %}{{- "[INST]" + message.content + "[/INST]" }}
{%- elif message.role == "tool" %}{{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
{%- elif message.tool_calls %}CALLS
{%- else %}{{- message.content + "</s>" }}{%- endif %}{%- endfor %}"""
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    """{%- for call in message.tool_calls %}
{{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments | tojson }}
{%- endfor %}{{- "</s>" }}""",
)
# As Mistral Small 3.1's: each call ends with its id, which the service chooses and the model does not write.
MISTRAL_IDS = _MISTRAL.replace(
    "CALLS",
    """{{- "[TOOL_CALLS] [" }}{%- for call in message.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{{- ", " if not loop.last else "]</s>" }}{%- endfor %}""",
)

_DEEPSEEK = """{{- tools | tojson }}
{%- for message in messages %}
{%- if message.role == "user" %}{{- "<｜User｜>" + message.content }}
{%- elif message.role == "tool" %}
{{- "<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" }}
{%- elif message.tool_calls %}CALLS
{%- else %}{{- "<｜Assistant｜>END" + message.content + "<｜end▁of▁sentence｜>" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != "tool" %}{{- "<｜Assistant｜>END" }}{%- endif %}"""
DEEPSEEK_V31 = _DEEPSEEK.replace("END", "</think>").replace(
    "CALLS",
    """{%- if messages[loop.index0 - 1].role == "user" %}{{- "<｜Assistant｜></think>" }}{%- endif %}
{{- "<｜tool▁calls▁begin｜>" }}{%- for call in message.tool_calls %}
{{- "<｜tool▁call▁begin｜>" + call.function.name + "<｜tool▁sep｜>" + call.function.arguments }}
{{- "<｜tool▁call▁end｜>" }}{%- endfor %}{{- "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" }}""",
)
DEEPSEEK_V3 = _DEEPSEEK.replace("END", "").replace(
    "CALLS",
    """{%- if messages[loop.index0 - 1].role == "user" %}{{- "<｜Assistant｜>" }}{%- endif %}
{{- "<｜tool▁calls▁begin｜>" }}{%- for call in message.tool_calls %}
{{- "\\n" if not loop.first }}{{- "<｜tool▁call▁begin｜>" + call.type + "<｜tool▁sep｜>" + call.function.name }}
{{- "\\n```json\\n" + call.function.arguments + "\\n```<｜tool▁call▁end｜>" }}{%- endfor %}
{{- "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" }}""",
)

GPT_OSS = """{{- "<|start|>developer<|message|>" + tools | tojson + "<|end|>" }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.thinking %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
{{- "<|start|>assistant to=functions." + message.tool_calls[0].function.name }}
{{- "<|channel|>commentary json<|message|>" + message.tool_calls[0].function.arguments | tojson + "<|call|>" }}
{%- elif message.role == "tool" %}
{{- "<|start|>functions to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
{%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""

_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
_HERMES_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@dataclass(frozen=True)
class FamilyTemplate:
    """A template, the token that ends an answer, further special tokens, and tokens that are text."""

    source: str
    end: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


def _chatml(source: str) -> FamilyTemplate:
    return FamilyTemplate(source, "<|im_end|>", _CHATML_MARKS, _HERMES_MARKS)


def _of_deepseek(source: str) -> FamilyTemplate:
    return FamilyTemplate(source, "<｜end▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>"), deepseek.MARKS)


TEMPLATES = {
    "qwen2.5": _chatml(QWEN25),
    "qwen3": _chatml(QWEN3),
    "qwen3_coder": _chatml(QWEN3_CODER),
    "arguments_first": _chatml(ARGUMENTS_FIRST),
    "llama3": FamilyTemplate(
        LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    ),
    "mistral_named": FamilyTemplate(MISTRAL_NAMED, "</s>", ("[INST]", "[/INST]", *mistral.MARKS)),
    "mistral_ids": FamilyTemplate(MISTRAL_IDS, "</s>", ("[INST]", "[/INST]", *mistral.MARKS)),
    "deepseek_v3": _of_deepseek(DEEPSEEK_V3),
    "deepseek_v3.1": _of_deepseek(DEEPSEEK_V31),
    "gpt_oss": FamilyTemplate(GPT_OSS, "<|call|>", harmony.MARKS),
}

# As Qwen3.5's: thinking is begun for the answer, or written as none, and left out before the last question.
_THINKS = f"""{_CHATML_TOOLS}
{{%- set ns = namespace(last=0) %}}
{{%- for m in messages %}}{{%- if m.role == "user" %}}{{%- set ns.last = loop.index0 %}}{{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
{{%- if message.role == "assistant" %}}
{{{{- "<|im_start|>assistant\\n" }}}}
{{%- if loop.index0 > ns.last %}}
{{{{- "<think>\\n" + (message.reasoning_content or "") + "\\n</think>\\n\\n" }}}}{{%- endif %}}
{{{{- message.content or "" }}}}
{{%- for call in message.tool_calls or [] %}}
{{{{- "\\n" if not loop.first else "\\n\\n" if message.content }}}}{_CODER_CALL}{{%- endfor %}}
{{{{- "<|im_end|>\\n" }}}}
{_CHATML_RESULTS}
{{%- if add_generation_prompt %}}{{{{- "<think>\\n" }}}}
{{%- if enable_thinking is false %}}{{{{- "\\n</think>\\n\\n" }}}}{{%- endif %}}{{%- endif %}}"""
THINKING = _chatml(_THINKS)
