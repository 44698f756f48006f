"""Calls as each family of models writes them."""

import json
from collections.abc import Callable

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _qwen3_coder(name: str, arguments: str) -> str:
    texts = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in json.loads(arguments).items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(texts)}</function>\n</tool_call>"


# By family: returns the text of a call, of the name and the arguments as JSON.
WRITTEN: dict[str, Callable[[str, str], str]] = {
    "hermes": lambda name, given: f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>',
    "qwen3_coder": _qwen3_coder,
    "llama3": lambda name, given: f'{{"name": "{name}", "parameters": {given}}}',
    "mistral": lambda name, given: f'[TOOL_CALLS][{{"name": "{name}", "arguments": {given}}}]',
    "deepseek": lambda name, given: (
        f"<｜tool▁calls▁begin｜>{_BEGIN}function{_SEPARATOR}{name}\n```json\n{given}\n```{_END}<｜tool▁calls▁end｜>"
    ),
    "gpt_oss": lambda name, given: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}<|call|>"
    ),
}
