"""What constrained texts may say next: compiled grammars, one matcher for each row, and their masks of tokens.

llguidance compiles the grammars and computes the masks. Both release Python's lock. A grammar is compiled
before a row names it, since that can take as long as many steps (`engine/grammars/grammar_desk.py`). The
matcher of a row is a copy that shares what was compiled.
"""

import ctypes
import json
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from lightkv.errors import LightKVError
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.sampling_params import Grammar, InvalidParams

from .structural_tags import grammars_of, lark_of_ebnf, quoted, with_whitespace
from .tokenizer import Tokenizer

Result = TypeVar("Result")

# llguidance compiles what a grammar nests by recursion. This much holds whatever fits in MAX_GRAMMAR_BYTES: the
# longest chains of references take 47 MiB. Masks, copies and the end of a matcher need no deep stack.
COMPILE_STACK_BYTES = 64 * 2**20


class InvalidGrammar(InvalidParams):
    """A grammar that cannot be: it does not parse, no text matches it, or it exceeds a limit.

    `field`: the request's field that it came in. `reason`: what is wrong.
    """

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        LightKVError.__init__(self, f"{field} cannot be used: {reason}")


def limits() -> LLParserLimits:
    """Returns the limits of compiling a grammar and of computing a mask, which are those of the service.

    A mask that exceeds them takes some ten milliseconds, and ends its answer with an error.
    """
    return LLParserLimits(
        max_items_in_row=5_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def _source_of(grammar: Grammar, special: Mapping[str, int]) -> str:
    """Returns the grammar in the form that llguidance compiles. Raises InvalidGrammar for a text that is not
    JSON, GBNF or a structural tag where it has to be.

    `special`: the ids of the special tokens, by the texts by which a structural tag names them.
    """
    try:
        match grammar.kind:
            case "json_object":
                return LLMatcher.grammar_from_json_schema(with_whitespace({"type": "object"}))
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(with_whitespace(json.loads(grammar.text)))
            case "regex":
                # \d and \w are of ASCII, as in JSON schemas.
                return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'dw')}/")
            case "choice":
                choices = json.loads(grammar.text)
                if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
                    raise ValueError("the choices are not a list of texts")
                if not choices:
                    raise ValueError("the list of choices is empty; give at least one")
                return "start: " + " | ".join(map(quoted, choices))
            case "structural_tag":
                return grammars_of(grammar.text, special)
            case _:
                return LLMatcher.grammar_from_lark(lark_of_ebnf(grammar.text))
    except ValueError as error:
        raise InvalidGrammar("grammar", reason_of(error)) from error
    except RecursionError as error:
        raise InvalidGrammar("grammar", "it is nested too deeply") from error
    except Exception as error:  # of what is read as it is not written, in any library
        raise InvalidGrammar("grammar", f"it cannot be read as {grammar.kind}") from error


def _built(source: str, tokenizer: LLTokenizer) -> LLMatcher:
    try:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether any text matches
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of llguidance is not even an Exception
        raise InvalidGrammar("grammar", reason_of(error)) from error
    if matcher.is_error():
        raise InvalidGrammar("grammar", reason_of(matcher.get_error()))
    return matcher


def reason_of(error: object) -> str:
    """Returns llguidance's message in one line of at most 300 characters, in other words where those are about
    llguidance."""
    text = " ".join(str(error).replace("<non-verbose/>", "").split())
    text = text.partition(" 1 | ")[0]  # without the grammar's lines
    if text.startswith("NoExtension"):
        return "no text matches it"
    if text.startswith("panic") or type(error).__name__ == "PanicException":
        return "llguidance fails on it; write it in another way"
    return text[:300] or "llguidance gives no reason"


class Compiled(NamedTuple):
    """A compiled grammar at the beginning of a text, and the tokens that end a text."""

    matcher: LLMatcher
    end_ids: frozenset[int]


def _in_thread(run: Callable[[], Result], stack_bytes: int, niceness: int) -> "Future[Result]":
    """Runs `run` in a thread of its own. Returns the future of its result."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            if niceness:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    before = threading.stack_size(stack_bytes)  # that of the threads that start from now on
    try:
        threading.Thread(target=work, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    return future


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`. uordblks and hblkhd: the bytes in use, in arenas and mapped on their own."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def heap_bytes() -> int:
    """Returns the bytes that this process has allocated with malloc and not freed; 0 where libc cannot tell."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = _MallInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


def return_free_memory() -> None:
    """Has malloc return what it holds of freed memory to the system, where libc can. It takes milliseconds."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class ModelTokens(NamedTuple):
    """What grammars need of a model. `end_ids`: the tokens that end a text. `special`: the ids of the tokens
    that are no text of their own, by their names."""

    tokenizer: LLTokenizer
    end_ids: frozenset[int]
    special: Mapping[str, int]

    @classmethod
    def load(cls, directory: Path | None, vocab_size: int) -> "ModelTokens":
        """Reads those of the model in `directory`, which takes a part of a second. `vocab_size`: the width of
        the logits. Raises InvalidGrammar if no grammar can be used with the model."""
        try:
            if directory is None:
                raise ValueError("it has no tokenizer")
            own = Tokenizer(directory)
            end_ids = own.eos_ids
            if not end_ids:
                raise ValueError("the model names no end token")
            text = own.sampled_json()
            tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(end_ids))
            added = [(one["content"], one["id"]) for one in json.loads(text).get("added_tokens") or ()]
            special = {
                name: token_id
                for name, token_id in added
                if token_id < vocab_size and tokenizer.is_special_token(token_id)
            }
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance takes fewer kinds of tokenizers, and may panic at others
            raise InvalidGrammar("grammar", f"not with this model ({reason_of(error)})") from error
        return cls(tokenizer, end_ids, special)

    def compile(
        self, grammar: Grammar, stack_bytes: int = COMPILE_STACK_BYTES, niceness: int = 0
    ) -> LLMatcher:
        """Returns a matcher at the beginning of a text, which is compiled in a thread of its own with a stack
        of this size; a grammar that nests too deeply for it ends the process. Raises InvalidGrammar.

        `niceness`: that of the thread. Python's part runs in the calling thread, so that the lock is never held
        by a thread that others go before.
        """
        source = _source_of(grammar, self.special)
        return _in_thread(partial(_built, source, self.tokenizer), stack_bytes, niceness).result()


class RowGrammar:
    """The grammar of one row: it says which tokens may follow, and takes the token that was sampled.

    Its matcher, which may take megabytes, goes with the last of `max_tokens` tokens, those of `output_ids`
    included. `has_ended`: whether the text has ended, or has failed.
    """

    def __init__(
        self, grammar_id: int, compiled: Compiled | None, output_ids: bytes, max_tokens: int | None = None
    ) -> None:
        self.grammar_id = grammar_id
        self._compiled = compiled
        self._output_ids = output_ids
        self._num_left = None if max_tokens is None else max_tokens - len(output_ids) // TOKEN_BYTES
        self._end_ids: frozenset[int] = frozenset()
        self._matcher: LLMatcher | None = None
        self.has_ended = False

    def ready(self) -> LLMatcher | None:
        """Returns the matcher, once it has taken the row's output so far; None after the end of the text.

        Raises InvalidGrammar.
        """
        if self._matcher is None and not self.has_ended:
            if self._compiled is None:  # of a request that has ended before its row began
                raise InvalidGrammar("grammar", "it is not compiled any more")
            matcher, self._end_ids = self._compiled.matcher.deep_copy(), self._compiled.end_ids
            ids = array("i", self._output_ids).tolist()
            if ids and matcher.try_consume_tokens(ids) < len(ids):
                raise InvalidGrammar("grammar", f"the text so far, of {len(ids)} tokens, does not match it")
            self._matcher = matcher
        return self._matcher

    def take(self, token: int) -> int:
        """Takes the sampled token. Returns it, or an end token where the text has to end and `min_tokens` had
        ruled out all end tokens. Raises InvalidGrammar if the text cannot go on."""
        matcher = self.ready()
        if matcher is None:  # a step that was planned before the end was known
            return token
        is_failed = matcher.is_error()  # a limit that was met, for example; the matcher stays so
        if not is_failed and matcher.is_stopped():
            token = token if token in self._end_ids else min(self._end_ids)
        if not is_failed and matcher.consume_token(token):
            if self._num_left is not None:
                self._num_left -= 1
            if token in self._end_ids or self._num_left == 0:
                self.drop()
            return token
        error = reason_of(matcher.get_error())
        self.drop()
        raise InvalidGrammar("grammar", f"the text could not go on ({error}); simplify it")

    def drop(self) -> None:
        """Forgets the text. Every token may follow now; no answer uses them."""
        self._matcher, self.has_ended = None, True


class Grammars:
    """The compiled grammars by their ids, and those of the rows that have one.

    `compile` and `release` may run in another thread than the rest.

    Args:
        directory: that of the model, with its tokenizer; None refuses every grammar.
        vocab_size: the width of the logits; tokens that the tokenizer lacks are never allowed.
    """

    def __init__(self, directory: Path | None, vocab_size: int) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._model: Future[ModelTokens] | None = None
        self._executor = LLExecutor()
        self._compiled: dict[int, Compiled] = {}
        self._rows: dict[int, RowGrammar] = {}
        self._released: deque[int] = deque()  # their rows have ended, and are to be forgotten

    @property
    def mask_words(self) -> int:
        """The int32 words of one row's mask."""
        return (self._vocab_size + 31) // 32

    @property
    def num_rows(self) -> int:
        """The rows that have a grammar."""
        return len(self._rows)

    def prepare(self) -> None:
        """Reads the tokenizer, which takes a part of a second, unless it has been read. A thread that did so
        beside steps would hold Python's lock for most of that time. `compile` raises what is wrong with it."""
        if self._model is None:
            load = partial(ModelTokens.load, self._directory, self._vocab_size)
            self._model = _in_thread(load, COMPILE_STACK_BYTES, 0)
        wait((self._model,))

    def compile(self, grammar_id: int, grammar: Grammar, niceness: int = 0) -> None:
        """Compiles a grammar, and keeps it until `release`. `niceness`: that of the thread that does it. Raises
        InvalidGrammar, and ValueError for an id in use."""
        if grammar_id in self._compiled:
            raise ValueError(f"grammar {grammar_id} is compiled already; give each its own id")
        self.prepare()
        assert self._model is not None
        model = self._model.result()
        self._compiled[grammar_id] = Compiled(model.compile(grammar, niceness=niceness), model.end_ids)

    def release(self, grammar_id: int) -> None:
        """Forgets a compiled grammar, and soon the rows that have it, whose requests must have ended."""
        if self._compiled.pop(grammar_id, None) is not None:
            self._released.append(grammar_id)

    def trim(self) -> None:
        """Returns the memory of released grammars and of texts that have ended to the system. For when no step
        waits."""
        has_ended = any(one.has_ended for one in self._rows.values())
        self._rows = {row: one for row, one in self._rows.items() if not one.has_ended}
        if self._forget_rows() or has_ended:
            return_free_memory()

    def set_row(
        self, row: int, grammar_id: int | None, output_ids: bytes = b"", max_tokens: int | None = None
    ) -> None:
        """Notes what the text of the sequence in `row` has to be: a compiled grammar; None leaves it free.

        `output_ids`: what the sequence has generated already, int32 bytes. `max_tokens`: the most that it will
        have generated, these included. The text of a row whose grammar was released before fails, since the
        row's request has ended.
        """
        self._forget_rows()
        self._rows.pop(row, None)
        if grammar_id is not None:
            self._rows[row] = RowGrammar(grammar_id, self._compiled.get(grammar_id), output_ids, max_tokens)

    def of(self, row: int) -> RowGrammar | None:
        """Returns the grammar of a row that has one."""
        return self._rows.get(row)

    def fill(self, masks: np.ndarray, grammars: Sequence[tuple[int, RowGrammar]]) -> dict[int, str]:
        """Writes which tokens may follow, computed in parallel.

        masks: int32 `[n, mask_words]`, contiguous; a set bit allows a token. grammars: the index of a mask, and
        the grammar that it is of. The other masks, and those of texts that have ended, allow every token.
        Returns why a grammar failed, by the index of its mask; it allows every token.
        """
        if masks.dtype != np.int32 or masks.shape[1] != self.mask_words or not masks.flags.c_contiguous:
            raise ValueError(f"masks of {masks.dtype} {masks.shape}; give int32 [n, {self.mask_words}]")
        masks.fill(-1)
        matchers, failed = [], {}
        for idx, grammar in grammars:
            try:
                matcher = grammar.ready()
            except InvalidGrammar as error:
                grammar.drop()
                failed[idx] = str(error)
                continue
            if matcher is not None:
                matchers.append((matcher, idx))
        if matchers:
            self._executor.unsafe_compute_mask_ptr(
                matchers, masks.ctypes.data, 4 * self.mask_words, len(masks)
            )
        return failed

    def _forget_rows(self) -> bool:
        """Forgets the rows of released grammars. Returns whether any was released since the last time."""
        released = set[int]()
        while self._released:
            released.add(self._released.popleft())
        if released:
            self._rows = {row: one for row, one in self._rows.items() if one.grammar_id not in released}
        return bool(released)
