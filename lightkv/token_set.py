"""A set of token ids, kept and sent as bits: a vocabulary of 150,000 tokens takes 19 kB, and as a list of
Python's integers six megabytes."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

MAX_TOKEN_ID = 2**22 - 1  # no vocabulary is larger


class TokenSet(msgspec.Struct, frozen=True):
    """A set of token ids. Equal sets have equal bits.

    `bits`: one bit for each token id from 0 to the largest of the set, the lowest bit of a byte first.
    """

    bits: bytes = b""

    def __post_init__(self) -> None:
        """Raises ValueError for bits that are not those of `of`."""
        if len(self.bits) > (MAX_TOKEN_ID + 1) // 8 or self.bits.endswith(b"\0"):
            raise ValueError(f"{len(self.bits)} bytes of bits; make token sets with TokenSet.of")

    @classmethod
    def of(cls, token_ids: Iterable[int] | np.ndarray) -> "TokenSet":
        """Returns the set of `token_ids`. Raises ValueError for one outside 0 to MAX_TOKEN_ID."""
        if not isinstance(token_ids, np.ndarray | Sequence):
            token_ids = list(token_ids)
        try:
            ids = np.asarray(token_ids, dtype=np.int64)
        except OverflowError as error:
            raise ValueError(f"a token id of more than 64 bits; give 0 to {MAX_TOKEN_ID}") from error
        if not ids.size:
            return cls()
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > MAX_TOKEN_ID:
            raise ValueError(f"token ids from {low} to {high}; give 0 to {MAX_TOKEN_ID}")
        is_in = np.zeros(high + 1, dtype=bool)
        is_in[ids] = True
        return cls(np.packbits(is_in, bitorder="little").tobytes())

    @property
    def highest(self) -> int:
        """The largest token id. Raises ValueError where the set is empty."""
        if not self.bits:
            raise ValueError("an empty set has no highest token")
        return 8 * len(self.bits) - 9 + self.bits[-1].bit_length()

    def ids(self) -> np.ndarray:
        """Returns the token ids, int64 [n], ascending."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(self.bits, np.uint8), bitorder="little"))

    def without(self, other: "TokenSet") -> "TokenSet":
        """Returns the set of the tokens that are not in `other`."""
        is_in = np.frombuffer(self.bits, np.uint8).copy()
        shared = min(len(self.bits), len(other.bits))
        is_in[:shared] &= ~np.frombuffer(other.bits, np.uint8)[:shared]
        return TokenSet(is_in.tobytes().rstrip(b"\0"))

    def __or__(self, other: "TokenSet") -> "TokenSet":
        long, short = sorted((self.bits, other.bits), key=len, reverse=True)
        is_in = np.frombuffer(long, np.uint8).copy()
        is_in[: len(short)] |= np.frombuffer(short, np.uint8)
        return TokenSet(is_in.tobytes())

    def __len__(self) -> int:
        return int.from_bytes(self.bits, "little").bit_count()

    def __contains__(self, token: object) -> bool:
        if type(token) is not int or not 0 <= token < 8 * len(self.bits):
            return False
        return bool(self.bits[token // 8] >> token % 8 & 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids().tolist())

    def __repr__(self) -> str:
        some = self.ids()[:4].tolist()
        return f"TokenSet({len(self)} tokens: {', '.join(map(str, some))}{', …' if len(self) > 4 else ''})"
