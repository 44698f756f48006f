"""Conversion of token ids from what callers have them in to the int32 bytes that the ledger compares."""

import reprlib
from collections.abc import Sequence

import numpy as np

TokenIds = Sequence[int] | np.ndarray | bytes
"""Any sequence of integers, or int32 bytes, which are used as they are without a check."""


def int32_bytes(token_ids: TokenIds) -> bytes:
    """Returns `token_ids` as int32 bytes.

    Raises TypeError unless they are integers in a sequence, ValueError unless each is from 0 to 2**31 - 1, in
    one dimension.
    """
    if isinstance(token_ids, bytes):
        return token_ids
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise ValueError("token ids of different lengths: give integers, in one dimension") from error
    # Python's integers that no type of numpy holds are refused below.
    are_large = ids.dtype.kind == "O" and all(type(one) is int for one in ids.flat)
    if ids.size and (ids.ndim == 0 or ids.dtype.kind not in "iu") and not are_large:
        raise TypeError(
            f"token ids are {reprlib.repr(token_ids)}, of type {ids.dtype}: give a list of integers, such as "
            "[1, 2, 3]"
        )
    if ids.size and ids.ndim != 1:
        raise ValueError(f"token ids of shape {ids.shape}: give integers, in one dimension")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise ValueError(f"token ids from {ids.min()} to {ids.max()}: each is at least 0, and fits 32 bits")
    return ids.astype(np.int32).tobytes()
