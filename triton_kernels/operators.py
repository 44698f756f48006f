"""Registers functions that take records as operators of torch, so that torch.compile keeps each of them
whole."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Flat(NamedTuple):
    """The arguments of a call as torch's operators take them: the tensors that are read and those that are
    written, the numbers, and a word for each value and each record, in their order."""

    read: list[Tensor]
    written: list[Tensor]
    integers: list[int]
    floats: list[float]
    form: str


class Operator:
    """A function that writes to some of its arguments and returns nothing, registered as `lightkv::name`.

    Its arguments are tensors, numbers, None, and named tuples or dataclasses of these, whose classes are
    `records`. Code that torch compiles calls the registered operator, which takes its arguments as `flat`
    returns them. Other code calls the function itself.
    """

    def __init__(
        self, name: str, function: Callable[..., None], writes: Collection[str], records: Sequence[type]
    ) -> None:
        self._function = function
        self._is_written = tuple(one in writes for one in signature(function).parameters)
        self._records = {one.__name__: one for one in (*records, tuple, list, frozenset)}
        # torch.compile follows no look-up of a dataclass' fields.
        self._fields = {
            one.__name__: [field.name for field in fields(one)] for one in records if is_dataclass(one)
        }

        def run(
            read: Sequence[Tensor],
            written: Sequence[Tensor],
            integers: Sequence[int],
            floats: Sequence[float],
            form: str,
        ) -> None:
            values = {"r": iter(read), "w": iter(written), "i": iter(integers), "f": iter(floats)}
            words = iter(form.split())
            function(*(self._rebuilt(words, values) for _ in self._is_written))

        self.registered = torch.library.custom_op(f"lightkv::{name}", run, mutates_args=("written",))
        self.registered.register_fake(lambda *_: None)  # the outputs are arguments

    def __call__(self, *arguments: Any) -> None:
        """Runs the function."""
        if torch.compiler.is_compiling():
            self.registered(*self.flat(*arguments))
        else:
            self._function(*arguments)

    def flat(self, *arguments: Any) -> Flat:
        """Returns the arguments as the registered operator takes them."""
        flat = Flat([], [], [], [], "")
        words: list[str] = []
        for is_written, value in zip(self._is_written, arguments, strict=True):
            self._flatten(
                value, flat.written if is_written else flat.read, "w" if is_written else "r", flat, words
            )
        return Flat(flat.read, flat.written, flat.integers, flat.floats, " ".join(words))

    def _flatten(self, value: Any, tensors: list[Tensor], kind: str, flat: Flat, words: list[str]) -> None:
        """Adds a value to the lists and its words to `words`. `tensors`: where its tensors go, which are
        `kind`."""
        if isinstance(value, Tensor):
            tensors.append(value)
            words.append(kind)
        elif value is None or isinstance(value, bool):
            words.append(str(value))
        elif isinstance(value, int):
            flat.integers.append(value)
            words.append("i")
        elif isinstance(value, float):
            flat.floats.append(value)
            words.append("f")
        else:
            name = _plain_name(value) or type(value).__name__
            names = self._fields.get(name)
            parts = list(value) if names is None else [getattr(value, one) for one in names]
            words.append(f"{name}:{len(parts)}")
            for part in parts:
                self._flatten(part, tensors, kind, flat, words)

    def _rebuilt(self, words: Iterator[str], values: dict[str, Iterator[Any]]) -> Any:
        """Returns the value that the next words stand for."""
        word = next(words)
        if word in values:
            return next(values[word])
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        name, count = word.split(":")
        parts = [self._rebuilt(words, values) for _ in range(int(count))]
        record = self._records[name]
        return record(parts) if record in (tuple, list, frozenset) else record(*parts)


def _plain_name(value: Any) -> str | None:
    """Returns the name of a plain collection's class, which torch.compile of torch 2.11 does not know."""
    for name, plain in (("tuple", tuple), ("list", list), ("frozenset", frozenset)):
        if type(value) is plain:
            return name
    return None


_CONSTANTS = {"None": None, "True": True, "False": False}


def operator(
    name: str, *, writes: Collection[str], records: Sequence[type] = ()
) -> Callable[[Callable[..., None]], Operator]:
    """Returns a decorator that makes a function the operator `lightkv::name`, which writes to the tensors in
    the arguments `writes` alone. `records`: as of `Operator`."""
    return lambda function: Operator(name, function, writes, records)
