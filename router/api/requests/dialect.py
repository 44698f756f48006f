"""How tools are described to the service's model, and how its answers are read: as the options --tool-parser
and --reasoning-parser say, or else as its chat template shows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from lightkv.router.api.answers.chat_writer import Reading
from lightkv.router.sampling_params import MAX_GRAMMAR_BYTES, Grammar, InvalidParams
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.text.answer_reader import AnswerReader, CallReader, think
from lightkv.router.text.grammars import InvalidGrammar
from lightkv.router.text.structural_tags import format_of_grammar
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.router.text.tool_calls import harmony, history
from lightkv.router.text.tool_calls.constrained import (
    read_calls_or_format,
    read_named,
    read_required,
    schema_text,
)
from lightkv.router.text.tool_calls.families import (
    FAMILIES,
    THINK_BEGIN,
    THINK_END,
    Family,
    family_of,
    reasoning_of,
    variables_of,
    wants_text,
)
from lightkv.router.text.tool_calls.forms import Format, either
from lightkv.router.text.tool_calls.rendered import (
    PROBED_TOOLS,
    CallTexts,
    call_texts,
    takes_text_after_results,
)
from lightkv.router.text.tool_calls.source import Source, Steps

from .prompts import Chat
from .tools import Function, ToolUse

_MAX_TAIL = 16  # tokens of the prompt's end that may open the reasoning
_PLAIN = {"role", "content"}  # of a message without calls or reasoning
_PROBED = ToolUse([Function(name=name, parameters=one, strict=None) for name, one in PROBED_TOOLS.items()])
_THINKING = ("enable_thinking", "thinking")  # variables that switch a template's reasoning on and off


class ChatDialect:
    """The model's way to write tools, calls and reasoning. `tokenizer`: that of the model."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.tool_template
        self._names = variables_of(template) | variables_of(tokenizer.template)
        self._takes_tools = "tools" in self._names
        self._family = FAMILIES.get(settings.tool_parser or family_of(template) or "none")
        self._reasoning = settings.reasoning_parser or reasoning_of(tokenizer.template) or "none"
        is_family = self._family is not None and self._family.has_messages
        self._has_messages = is_family or self._reasoning == "gpt_oss"
        self._wants_text = wants_text(template)

    def prepared(self, chat: Chat, use: ToolUse | None, is_constrained: bool = False) -> Chat:
        """Returns a chat as the template takes it: with calls and tools in the model's form, and with the
        variables that switch its reasoning. Raises InvalidParams.

        `use`: the functions that may be called. `is_constrained`: a grammar says what the answer has to be, so
        it has no reasoning.
        """
        if use is not None:
            self._check(use)
        is_constrained = is_constrained or _is_required(use)
        variables = self._variables(chat, self._silent(use) if is_constrained else {})
        tools = None if use is None else use.described
        messages = self._written(chat.messages)
        if any(message["role"] == "tool" for message in messages):
            joined = history.with_texts_in_results(messages)
            if len(joined) < len(messages) and not self._takes_text_after_results:
                messages = joined
        return replace(chat, messages=messages, variables=variables, tools=tools)

    def grammar(self, use: ToolUse | None, given: Grammar | None) -> Grammar | None:
        """Returns what the whole answer has to be; None leaves it free. Raises InvalidParams.

        `given`: what the request itself says, which was checked. If functions may be called, the answer is of
        it or is calls, but for a structural tag.
        """
        is_required = _is_required(use)
        if given is not None and given.kind == "structural_tag" and not is_required:
            return given  # it says itself where calls and messages are
        try:
            if self._has_messages and (is_required or given is not None):
                call = None if use is None else self._calls(FAMILIES["gpt_oss"], use)
                answer = None if given is None or is_required else format_of_grammar(given)
                return _tagged(harmony.whole_form(call, answer), use)
            if use is None or (given is None and not is_required):
                return given
            if self._family is None:  # some call is required, or chat has refused the tools
                return use.grammar
            if is_required:
                return _tagged(self._calls(self._family, use), use)
            assert given is not None
            if self._family.is_bare:
                if not _is_told_from_json(given):
                    allowed = "JSON or a choice as the format: the model's calls look like others"
                    raise InvalidParams("tools", ", ".join(use.schemas), allowed)
                calls = self._family.form(use.callable_schemas, use.is_parallel)
            else:
                calls = self._calls(self._family, use)
            return _tagged(either([calls, format_of_grammar(given)]), use)
        except RecursionError as error:
            raise InvalidParams("tools", "nested too deeply", "schemas of fewer levels") from error

    def reading(
        self,
        use: ToolUse | None,
        prompt_ids: np.ndarray,
        given: Grammar | None = None,
        includes_reasoning: bool = True,
    ) -> Reading | None:
        """Returns how the answers are read; None if each is all content. Raises InvalidParams.

        `prompt_ids`: int32 [n]. `given`: what the request itself says of the answer, which has no reasoning
        then. `includes_reasoning`: whether the client gets it.
        """
        if not includes_reasoning and self._reasoning == "none":
            allowed = "true, or start the service with --reasoning-parser"
            raise InvalidParams("include_reasoning", False, allowed)
        stages, marks = self._stages(use, prompt_ids, given)
        if not stages:
            return None
        max_calls = 1 if use is not None and not use.is_parallel else None
        return Reading(
            partial(AnswerReader, stages, max_calls),
            self._tokenizer.special_ids_of(marks),
            includes_reasoning,
            None if self._family is None else self._family.id_length,
        )

    def _stages(
        self, use: ToolUse | None, prompt_ids: np.ndarray, given: Grammar | None
    ) -> tuple[list[Callable[[Source], Steps[None]]], Sequence[str]]:
        """Returns the stages that read an answer, and the marks that they look for."""
        is_asked = use is not None or given is not None or self._reasoning == "gpt_oss"
        if self._has_messages and is_asked:
            messages = FAMILIES["gpt_oss"]
            return [_reader(messages, use)], messages.marks
        family = self._family if use is not None else None
        if use is not None and _is_required(use):
            if family is not None:
                return [_reader(family, use)], family.marks
            if use.name is not None:
                return [partial(read_named, name=use.name)], ()
            return [partial(read_required, tools=use.schemas)], ()
        if given is not None:
            if family is None or use is None:
                return [], ()
            if given.kind == "structural_tag":  # calls may be anywhere in it
                return [_reader(family, use)], family.marks
            read = partial(read_calls_or_format, family=family, tools=use.schemas)
            return [read], family.marks
        stages: list[Callable[[Source], Steps[None]]] = []
        marks: list[str] = []
        if self._reasoning != "none":
            tail = self._tokenizer.decode(prompt_ids[-_MAX_TAIL:], skip_special_tokens=False).rstrip()
            is_habit = self._reasoning == "deepseek_r1" and not tail.endswith(THINK_END)
            calls = CallReader(family.begin, _reader(family, use)) if family and family.begin else None
            stages.append(partial(think, is_inside=is_habit or tail.endswith(THINK_BEGIN), calls=calls))
            marks += THINK_BEGIN, THINK_END
        if family is not None:
            stages.append(_reader(family, use))
            marks += family.marks
        return stages, marks

    def _check(self, use: ToolUse) -> None:
        """Raises InvalidParams if tools cannot be described to the model, or its calls cannot be read."""
        remedy = ""
        if not self._takes_tools:
            remedy = "--chat-template: the model's own takes no tools"
        elif self._family is None and not _is_required(use):
            remedy = "--tool-parser: the model's chat template does not show how it writes calls"
        if remedy:
            names = ", ".join(function.name for function in use.functions)
            raise InvalidParams("tools", names, f"none, or start the service with {remedy}")

    def _written(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages as the chat template takes them."""
        id_length = None if self._family is None else self._family.id_length
        return [
            message if message.keys() == _PLAIN else history.with_calls(message, self._wants_text, id_length)
            for message in messages
        ]

    def _calls(self, family: Family, use: ToolUse) -> Format:
        """Returns the form of an answer that is calls: that of the chat template, or else of the family. A
        named function is called once."""
        form = family.form if self._texts is None else self._texts[1].form
        return form(use.callable_schemas, use.is_parallel and use.name is None)

    def _silent(self, use: ToolUse | None) -> dict[str, Any]:
        """Returns the variables of the template for an answer that a grammar leaves no room for reasoning."""
        if use is not None and self._texts is not None:
            return self._texts[0]
        return {} if self._switch is None else {self._switch: False}

    @cached_property
    def _takes_text_after_results(self) -> bool:
        return takes_text_after_results(self._render_probed)

    def _render_probed(
        self, messages: Sequence[dict[str, Any]], begins_answer: bool, variables: Mapping[str, Any] = {}
    ) -> str:
        """Renders messages with the tools that templates are probed with. Raises ChatTemplateError."""
        written = self._written(messages)
        return self._tokenizer.render_chat(written, begins_answer, variables, _PROBED.described)

    @cached_property
    def _texts(self) -> tuple[dict[str, Any], CallTexts] | None:
        """How the chat template writes calls, and the variables with which it continues its own prompt so."""
        family = FAMILIES["gpt_oss"] if self._has_messages else self._family
        if family is None:
            return None
        end_texts = [self._tokenizer.token_text(token_id) for token_id in self._tokenizer.eos_ids]
        for variables in [{}] if self._switch is None else [{self._switch: False}, {}]:
            render = partial(self._render_probed, variables=variables)
            texts = call_texts(render, end_texts, family)
            if texts is not None and texts.begin.startswith(family.begin):
                return variables, texts
        return None

    @property
    def _switch(self) -> str | None:
        """The variable that switches the template's reasoning on and off, if it has one."""
        return next((name for name in _THINKING if name in self._names), None)

    @property
    def takes_effort(self) -> bool:
        """Whether `reasoning_effort` sets a variable of the template."""
        return "reasoning_effort" in self._names or self._switch is not None

    def _variables(self, chat: Chat, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables of the template, those of `defaults` where the request does not set them."""
        variables = dict(chat.variables)
        switch = self._switch
        effort = chat.effort
        if effort is not None and "reasoning_effort" in self._names:
            variables.setdefault("reasoning_effort", effort)
        elif effort is not None and switch is not None:
            variables.setdefault(switch, effort != "none")
        return {**defaults, **variables}


def _is_required(use: ToolUse | None) -> bool:
    return use is not None and (use.is_required or use.name is not None)


def _is_told_from_json(given: Grammar) -> bool:
    """Returns whether one grammar can be of texts of `given` and of JSON objects. It takes white space in all
    of its JSON, or in none, and chooses between JSON and others by the first character."""
    match given.kind:
        case "json_object":
            return True
        case "json_schema":
            schema = json.loads(given.text)
            return not (isinstance(schema, dict) and "x-guidance" in schema)
        case "choice":
            return not any(text.lstrip().startswith("{") for text in json.loads(given.text))
    return False


def _tagged(form: Format, use: ToolUse | None) -> Grammar:
    """Returns the grammar of a form. Raises InvalidGrammar for one that is too large."""
    text = schema_text({"type": "structural_tag", "format": form})
    if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
        field = "response_format" if use is None else "tools"
        raise InvalidGrammar(field, f"its grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")
    return Grammar("structural_tag", text)


def _reader(family: Family, use: ToolUse | None) -> Callable[[Source], Steps[None]]:
    schemas = {} if use is None else use.schemas
    return lambda source: family.read(source, schemas)
