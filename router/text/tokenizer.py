"""Text to token ids and back: the tokenizer of a model directory, and its chat template.

transformers is not used, since importing it takes seconds and hundreds of megabytes in the API process.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import numpy as np
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lightkv.errors import LightKVError
from lightkv.integrations.model.context import CONTEXT_NAMES
from lightkv.router.engine.request import InvalidPrompt
from lightkv.router.model_files import one_line

from .tokenizer_files import (
    UnreadableTokenizer,
    read_object,
    read_sampling,
    read_settings,
    read_templates,
    read_tokenizer,
    sampled_part,
    special_tokens,
)

_SHORT = 4096  # longer texts (characters) and lists (tokens) are converted without holding Python's lock
_MIN_LONGEST_TOKEN = 32  # characters


class ChatTemplateError(LightKVError):
    """The model has no chat template, or its template refuses these messages."""


class Tokenizer:
    """The tokenizer and chat template of one model.

    Attributes:
        directory: that of the model.
        eos_ids: the ids that end an answer: those of generation_config.json, or else of config.json, and the
            tokenizer's own, without those beyond the vocabulary, which are never sampled.
        vocab_size: that of the model, which may be larger than the tokenizer's.
        max_model_len: the model's context in tokens; 0 if config.json does not name it.
        special_ids: the ids that `decode` leaves out by default.
        recommended: the sampling parameters that generation_config.json recommends, by name.
        is_byte_level: each token stands for the same bytes wherever it occurs.

    Args:
        directory: holds tokenizer.json and config.json, and may hold generation_config.json,
            tokenizer_config.json, special_tokens_map.json, added_tokens.json, and chat templates
            (chat_template.jinja, additional_chat_templates/, chat_template.json).
        chat_template: the source of a chat template to use in place of the model's own.

    Raises:
        UnreadableTokenizer: a file is missing or damaged.
        ChatTemplateError: `chat_template` does not parse.
    """

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        self.directory = directory
        config = read_object(directory / "config.json")
        text = config.get("text_config")  # that of a model of several modalities
        given = {name: value for name, value in config.items() if value is not None}
        config = (text if isinstance(text, dict) else {}) | given
        generation_config = read_object(directory / "generation_config.json", optional=True)
        settings, named = read_settings(directory)
        self._tokenizer, self._num_added = read_tokenizer(directory, named)
        self._special_tokens = special_tokens(named)

        eos = generation_config.get("eos_token_id")
        if eos is None:
            eos = config.get("eos_token_id")
        own = self._special_tokens.get("eos_token")
        own_id = None if own is None else self._tokenizer.token_to_id(own)
        eos_ids = [*(eos if isinstance(eos, list) else [eos]), own_id]
        if not all(token_id is None or _is_count(token_id) for token_id in eos_ids):
            raise UnreadableTokenizer(directory, f"its eos_token_id is {str(eos)[:100]!r}, not a token id")
        # A tokenizer may leave out ids, so that it has fewer tokens than its highest id says.
        self.vocab_size: int = config.get("vocab_size", self._num_ids)
        lengths = [config[name] for name in CONTEXT_NAMES if config.get(name) is not None]
        self.max_model_len: int = lengths[0] if lengths else 0
        if not _is_count(self.vocab_size) or not _is_count(self.max_model_len):
            sizes = f"a vocabulary of {self.vocab_size!r} and a context of {self.max_model_len!r} tokens"
            raise UnreadableTokenizer(directory / "config.json", f"names {sizes[:200]}")
        self.eos_ids = frozenset(one for one in eos_ids if one is not None and one < self.vocab_size)

        self.recommended = read_sampling(directory / "generation_config.json")
        templates = (
            read_templates(directory, settings) if chat_template is None else {"default": chat_template}
        )
        self._template_source, self._tool_source = templates.get("default"), templates.get("tool_use")
        if chat_template is not None:
            _ = self._template  # raises ChatTemplateError
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_texts = [token.content for token in added.values()]
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.is_byte_level = isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel)
        # Of tokens that were seen, or of all once `prepare` has run: their number is that of the vocabulary.
        self._text_of: dict[int, str] = {}
        self._whole_text_of: dict[int, str | None] = {}

    def prepare(self) -> None:
        """Does what the first requests would otherwise wait a tenth of a second for: looks at every token,
        compiles the chat template, and starts the threads for long texts. From then on a byte-level tokenizer
        keeps no more text, whichever tokens are sampled."""
        self.max_characters(1)
        if self.is_byte_level:
            for token_id in range(self.vocab_size):
                self.whole_text(token_id)
        with suppress(Exception):  # a template or a tokenizer that refuses this text may take others
            self.decode(self.encode("Hi " * _SHORT))
            self.encode_chat([{"role": "user", "content": "Hi"}])

    @property
    def template(self) -> str:
        """The source of the chat template; empty if there is none."""
        return self._template_source or ""

    @property
    def tool_template(self) -> str:
        """The source of the template for chats with tools, which may be one of its own."""
        return self.template if self._tool_source is None else self._tool_source

    def sampled_json(self) -> str:
        """Returns the tokenizer as a tokenizer.json, without the tokens beyond the model's vocabulary."""
        if self._num_added:
            text = self._tokenizer.to_str()
        else:
            text = (self.directory / "tokenizer.json").read_text(encoding="utf-8")
        return sampled_part(text, self.vocab_size) if self._num_ids > self.vocab_size else text

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """Returns the ids of those of `texts` that are special tokens."""
        return self.special_ids & set(map(self._tokenizer.token_to_id, texts))

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Returns the ids of `text`, int32 [n], with the special tokens that tokenizer.json adds to a text.

        add_bos_token and add_eos_token in tokenizer_config.json are ignored, as transformers 5 ignores them if
        there is a tokenizer.json. Raises InvalidPrompt for a text that the tokenizer cannot take.
        """
        try:
            encoding = self._encode(text, add_special_tokens)
        except TypeError:  # a lone surrogate, which JSON can carry and UTF-8 cannot
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoding = self._encode(text, add_special_tokens)
        return np.asarray(encoding.ids, dtype=np.int32)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> np.ndarray:
        """Returns the ids of `render_chat`, int32 [n]. The template writes the special tokens itself."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`. Bytes that are not UTF-8 become U+FFFD; unknown ids have no text."""
        ids = list(token_ids)
        if len(ids) <= _SHORT:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def max_characters(self, num_tokens: int) -> int:
        """Returns an upper bound of the characters in a text of `num_tokens` tokens.

        It holds for every tokenizer that keeps all characters of a text, as byte-level BPE does. A tokenizer
        that drops some (BERT's drops spaces) could make this few tokens of a longer text.
        """
        return num_tokens * self.longest_token

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continues_last: bool = False,
    ) -> str:
        """Returns the text that the model's chat template makes of `messages`.

        Args:
            messages: plain data such as {"role": "user", "content": "…"}.
            add_generation_prompt: end with the words that begin an assistant's answer.
            variables: further variables of the template; they take precedence over the special tokens.
            continues_last: the text ends with the content of the last message.
            tools: the functions that the model may call, described as in OpenAI's requests.

        Raises:
            ChatTemplateError: there is no template, it is broken, it does what its sandbox forbids, or it
                refuses the messages.
        """
        if tools and self._tool_source is not None:
            compiled, takes_parts = self._tool_template
        else:
            compiled, takes_parts = self._template
        mark = ""
        if continues_last:  # the text is cut where this stands
            if not messages:
                raise ChatTemplateError("there is no message to continue; send at least one")
            mark = secrets.token_hex(16)
            last = {**messages[-1], "content": f"{messages[-1].get('content') or ''}{mark} "}
            messages = [*messages[:-1], last]
        if takes_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            text = compiled.render(
                {
                    **self._special_tokens,
                    "documents": None,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template is a program that comes with the weights: it can raise any error.
        except Exception as error:
            reason = f"the model's chat template refuses these messages: {error}"
            raise ChatTemplateError(reason.replace(mark, "") if mark else reason) from error
        if not mark:
            return text
        before, found, after = text.rpartition(mark)
        if not found:
            raise ChatTemplateError(
                "the chat template leaves out the last message, so it cannot be continued; send another role, "
                "or continue_final_message: false"
            )
        return before if after.startswith(" ") else before.rstrip()  # a template may strip its messages

    def token_text(self, token_id: int, begins: bool = False) -> str:
        """Returns the text of one token within a text, also of a special token. Bytes that are not whole
        characters become U+FFFD. `begins`: it is the first token, of which some decoders leave out a space."""
        if self.is_byte_level and token_id not in self.special_ids:
            whole = self.whole_text(token_id)
            return self.decode([token_id], skip_special_tokens=False) if whole is None else whole
        if begins:
            return self.decode([token_id], skip_special_tokens=False)
        known = self._text_of.get(token_id)
        if known is None:
            before = [] if token_id in self.special_ids else self._plain_token
            text = self.decode([*before, token_id], skip_special_tokens=False)
            known = self._text_of[token_id] = text[len(self.decode(before)) :]
        return known

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its name in the vocabulary; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int, begins: bool = False) -> bytes:
        """Returns the bytes of one token within a text; none for special tokens and unknown ids. `begins`: as
        for `token_text`."""
        if not self.is_byte_level:
            if token_id in self.special_ids:
                return b""
            byte = self._byte_of.get(token_id)
            return self.token_text(token_id, begins).encode() if byte is None else bytes([byte])
        known = self._whole_text_of.get(token_id)
        if known is not None:
            return known.encode()
        token = None if token_id in self.special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode()  # an added token stands for its own text

    def last_added_token(self, text: str) -> tuple[int, str]:
        """Returns where the last added token begins in `text`, and its text: -1 and "" if there is none. A text
        is always split at these tokens, whatever stands beside them."""
        return max(((text.rfind(one), one) for one in self._added_texts), default=(-1, ""))

    def whole_text(self, token_id: int) -> str | None:
        """Returns the text of `token_bytes`, or None where its bytes are not whole characters by themselves."""
        try:
            return self._whole_text_of[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._whole_text_of[token_id] = text
            return text

    @cached_property
    def longest_token(self) -> int:
        """The characters of the longest token, at least 32: normalisers may join a few characters to one."""
        return max(_MIN_LONGEST_TOKEN, *map(len, self._tokenizer.get_vocab()))

    @cached_property
    def _plain_token(self) -> list[int]:
        """The id of some token with letters as its text; none if the tokenizer has no such token."""
        ids = self._encode("a", add_special_tokens=False).ids
        for token_id in (*ids, *self._tokenizer.get_vocab().values()):
            if token_id not in self.special_ids and self.decode([token_id]).isalpha():
                return [token_id]
        return []

    @cached_property
    def _byte_of(self) -> dict[int, int]:
        """The tokens that stand for a byte where the vocabulary has no token for a character, and the byte."""
        named = [(self._tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256)]
        return {
            token_id: byte
            for token_id, byte in named
            if token_id is not None and len(self.decode([token_id], skip_special_tokens=False)) <= 1
        }

    @cached_property
    def _num_ids(self) -> int:
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            if len(text) <= _SHORT:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            # `encode` holds Python's lock for all of its time, `encode_batch` for almost none of it.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, KeyboardInterrupt, SystemExit):
            raise
        # tokenizers raises bare Exception, and its panics are not even Exceptions.
        except BaseException as error:
            reason = f"the model's tokenizer cannot take this text ({one_line(error)})"
            raise InvalidPrompt(f"{reason}; send another, or its token ids") from error

    @cached_property
    def _template(self) -> "_Template":
        if self._template_source is None:
            raise ChatTemplateError("this model has no chat template; use plain completions instead")
        return _compiled(self._template_source)

    @cached_property
    def _tool_template(self) -> "_Template":
        return _compiled(self.tool_template)


class _GenerationBlock(Extension):
    """`{% generation %}` marks an assistant's text for training; here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a set)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Template(NamedTuple):
    """A chat template. `takes_parts`: it leaves out a content that is a text, and writes one that is a list of
    parts, as templates of models of several modalities do."""

    compiled: jinja2.Template
    takes_parts: bool


def _compiled(source: str) -> _Template:
    """Raises ChatTemplateError."""
    try:
        compiled = template_sandbox().from_string(source)
        asked = {"role": "user", "content": "lightkv"}
        takes_parts = not _writes(compiled, asked) and _writes(compiled, _in_parts(asked))
        return _Template(compiled, takes_parts)
    except Exception as error:  # too deep nesting fails in Python's own compiler
        reason = f"the model's chat template does not parse ({error}); use plain completions instead"
        raise ChatTemplateError(reason) from error


def _writes(template: jinja2.Template, message: Mapping[str, Any]) -> bool:
    """Returns whether a template writes the text of a message, "lightkv"."""
    try:
        return "lightkv" in template.render(messages=[message], add_generation_prompt=True)
    except Exception:  # a template is a program, and may need more than this
        return False


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose content, if it is a text, is a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def template_sandbox() -> ImmutableSandboxedEnvironment:
    """Makes the environment that chat templates are written for: that of transformers' apply_chat_template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own tojson escapes for HTML, which models were not trained on.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    return environment


def _is_count(value: Any) -> bool:
    """Returns whether `value` can be a token id, or a number of tokens."""
    return type(value) is int and 0 <= value < 2**31


def _byte_of_char() -> dict[str, int]:
    """Returns GPT-2's byte-level alphabet: printable Latin-1 is itself, other bytes are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
