"""Changes logits before a token is drawn: logit bias, penalties, banned tokens and words, and end tokens held
back by min_tokens.

`LogitEdits` holds the state of every row on the device; `RowEdits` is what new rows bring, on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightkv.errors import LightKVError
from lightkv.router.engine.step import NewRow
from lightkv.router.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_END_IDS, MAX_LOGIT_BIAS

# A count has this bit if the prompt holds the token, and the next if the token is banned; the bits below count
# the token in the output.
_PROMPT_BIT = 1 << 30
_BANNED_BIT = 1 << 29
_COUNT_MASK = _BANNED_BIT - 1
_TAIL = MAX_BAD_WORD_TOKENS - 1  # how many of a row's last tokens words look at
_MAX_WORDS = MAX_BAD_WORDS + MAX_END_IDS  # of a row: an end token is a word that is banned up to a position
_EVER = 2**62  # the position up to which other words are banned
_ROWS_AT_ONCE = 16  # whose masks are unpacked together, to 5 bytes for each token of the vocabulary
_ANY, _NONE = -1, -2  # in a word's beginning: every token, and none; in a row's tail -1 is before its first


class RowEdits(NamedTuple):
    """The logit edits of new rows, as one-dimensional arrays ready for upload: columns one after the other."""

    biases: np.ndarray  # float64 [3 * N]: place in the flattened bias buffers, token id, bias
    counts: np.ndarray  # int64 [2 * N]: place in the flattened counts, what to add there
    bans: np.ndarray  # int64 [2 * N]: row, the index of its mask
    masks: np.ndarray  # int64 [M * W]: bits of the tokens that may be sampled, W words a mask
    words: np.ndarray  # int64 [(_TAIL + 3) * N]: place in the flattened words, position, last token, earlier
    tails: np.ndarray  # int64 [(_TAIL + 1) * N]: row, its last tokens

    @classmethod
    def of(cls, new_rows: Sequence[NewRow], prompts: Sequence[bytes], vocab_size: int) -> "RowEdits":
        """Collects the edits of `new_rows`. `prompts`: as in StepPlan.

        Raises ValueError for a token id outside the vocabulary, a missing prompt, or too many end tokens.
        """
        bans, masks = _ban_masks(new_rows, vocab_size)
        return cls(
            _bias_entries(new_rows),
            _count_entries(new_rows, prompts, vocab_size).ravel(),
            bans,
            masks,
            _word_entries(new_rows, vocab_size),
            _tail_entries(new_rows),
        )


class Penalties(NamedTuple):
    """The penalties of a batch's rows, float32 `[B, 1]` each."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


class LogitEdits:
    """Every row's logit bias, counts of the tokens seen, banned tokens and words, and end tokens that may
    not be sampled yet.

    A word is banned by the row's last tokens, which are kept here, so that a step needs no token from the host,
    and up to a position. An end token is such a word.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(num_rows, MAX_LOGIT_BIAS, dtype=torch.float32, device=device)
        # Unused entries add 0 to different tokens: if all added to one token, they would queue at its address.
        unused = torch.arange(MAX_LOGIT_BIAS, dtype=torch.int32, device=device).remainder_(vocab_size)
        self._bias_ids = unused.repeat(num_rows, 1)
        self._tails = torch.full((num_rows, _TAIL), _ANY, dtype=torch.int32, device=device)
        self._word_starts = torch.full((num_rows, _MAX_WORDS, _TAIL), _NONE, dtype=torch.int32, device=device)
        self._word_ends = self._bias_ids[:, :_MAX_WORDS].contiguous()
        self._banned_until = torch.zeros(num_rows, _MAX_WORDS, dtype=torch.int64, device=device)

    @staticmethod
    def bytes_per_row(vocab_size: int) -> int:
        """Returns the bytes of device memory per row.

        These are 4 for each token of the vocabulary (counts), 8 for each entry of the logit bias and for the
        position of each word, and 4 for each token of the words and the tail.
        """
        words = _MAX_WORDS * (4 * (_TAIL + 1) + 8) + 4 * _TAIL
        return 4 * vocab_size + 8 * MAX_LOGIT_BIAS + words

    def set_rows(
        self,
        rows: Tensor,
        biases: Tensor,
        counts: Tensor,
        bans: Tensor,
        masks: Tensor,
        words: Tensor,
        tails: Tensor,
    ) -> None:
        """Clears `rows`, int64 `[n]`, and sets what the uploaded fields of their `RowEdits` say."""
        self._counts.index_fill_(0, rows, 0)
        self._bias.index_fill_(0, rows, 0.0)
        self._word_starts.index_fill_(0, rows, _NONE)
        if bans.numel():
            self._set_bans(bans.view(2, -1), masks)
        if words.numel():
            places, until, last, *before = words.view(_TAIL + 3, -1)
            self._banned_until.view(-1).index_copy_(0, places, until)
            self._word_ends.view(-1).index_copy_(0, places, last.to(torch.int32))
            starts = torch.stack(before, dim=1).to(torch.int32)
            self._word_starts.view(-1, _TAIL).index_copy_(0, places, starts)
        if tails.numel():
            tail_rows, *tokens = tails.view(_TAIL + 1, -1)
            self._tails.index_copy_(0, tail_rows, torch.stack(tokens, dim=1).to(torch.int32))
        if biases.numel():
            places, tokens, added = biases.view(3, -1)
            self._bias_ids.view(-1).index_copy_(0, places.long(), tokens.to(torch.int32))
            self._bias.view(-1).index_copy_(0, places.long(), added.to(torch.float32))
        if counts.numel():
            places, added = counts.view(2, -1)
            self._counts.view(-1).scatter_add_(0, places, added.to(torch.int32))

    def _set_bans(self, bans: Tensor, masks: Tensor) -> None:
        """Bans in each row the tokens whose bits its mask does not have. Their counts were 0."""
        num_tokens = self._counts.shape[1]
        masks = masks.view(torch.uint8).view(-1, _mask_bytes(num_tokens))
        places = torch.arange(8, dtype=torch.uint8, device=masks.device)
        for start in range(0, bans.shape[1], _ROWS_AT_ONCE):
            rows, mask_idxs = bans[:, start : start + _ROWS_AT_ONCE]
            chosen = masks.index_select(0, mask_idxs)
            is_allowed = chosen[:, :, None].bitwise_right_shift(places).bitwise_and_(1).flatten(1)
            banned = (is_allowed[:, :num_tokens] == 0).to(torch.int32) * _BANNED_BIT
            self._counts.index_copy_(0, rows, banned)

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts one more output token per row, and puts it at the end of the row's tail. Row 0 counts the
        padding's tokens, which are never read."""
        places = rows * self._counts.shape[1] + tokens
        self._counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        kept = self._tails.index_select(0, rows)[:, 1:]
        self._tails.index_copy_(0, rows, torch.cat((kept, tokens[:, None].to(torch.int32)), dim=1))

    def apply_(self, scores: Tensor, rows: Tensor, positions: Tensor, penalties: Penalties) -> None:
        """Changes scores, float32 `[B, V]`, in place.

        The order is: bias, repetition penalty, presence and frequency penalties, then -inf for banned tokens,
        for those that would complete a banned word, and for those that would end an answer too early. The
        repetition penalty is that of arXiv 1909.05858 section 4.1, for negative scores as in Hugging
        Face's RepetitionPenaltyLogitsProcessor; the others are those of OpenAI's API reference. Neutral
        parameters change no bit of a score, whatever the counts.
        """
        scores.scatter_add_(1, self._bias_ids.index_select(0, rows).long(), self._bias.index_select(0, rows))
        counts = self._counts.index_select(0, rows)  # [B, V]
        penalised = torch.where(scores < 0, scores * penalties.repetition, scores / penalties.repetition)
        torch.where(counts != 0, penalised, scores, out=scores)
        is_banned = counts.bitwise_and(_BANNED_BIT) != 0
        num_outputs = counts.bitwise_and_(_COUNT_MASK)
        scores.sub_(num_outputs * penalties.frequency)
        scores.sub_((num_outputs > 0) * penalties.presence)
        scores.masked_fill_(is_banned, -torch.inf)
        self._ban_words_(scores, rows, positions)

    def _ban_words_(self, scores: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Sets to -inf the last token of each word whose other tokens are the last ones of its row, where the
        word is banned up to a later position."""
        starts = self._word_starts.index_select(0, rows)  # [B, words, _TAIL]
        tails = self._tails.index_select(0, rows)[:, None]
        begins = ((starts == tails) | (starts == _ANY)).all(dim=-1)
        begins &= positions[:, None] < self._banned_until.index_select(0, rows)
        bias = torch.zeros_like(begins, dtype=torch.float32).masked_fill_(begins, -torch.inf)
        scores.scatter_add_(1, self._word_ends.index_select(0, rows).long(), bias)

    def check(self) -> None:
        """Checks the padding row and the counts; synchronises. Raises LightKVError."""
        if bool((self._bias[0] != 0).any()) or bool((self._word_starts[0] != _NONE).any()):
            raise LightKVError("the padding row 0 has a logit bias or banned words; never set row 0")
        if bool((self._counts[1:] < 0).any()):
            raise LightKVError("a token count has overflowed; a row was not set when its sequence opened")


def _bias_entries(new_rows: Sequence[NewRow]) -> np.ndarray:
    """Returns `RowEdits.biases`. float64 holds places, ids and biases exactly, so one array is enough."""
    entries = [
        (new_row.row * MAX_LOGIT_BIAS + entry_idx, token, bias)
        for new_row in new_rows
        for entry_idx, (token, bias) in enumerate(new_row.params.logit_bias.items())
    ]
    return np.array(entries, dtype=np.float64).reshape(-1, 3).T.ravel()


def _count_entries(new_rows: Sequence[NewRow], prompts: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """Returns the part of `RowEdits.counts` of the rows whose parameters look at counts, int64 `[2, N]`."""
    seen_in = [np.frombuffer(prompt, np.int32).astype(np.int64) for prompt in prompts]
    entries = [np.zeros((2, 0), np.int64)]
    for new_row in new_rows:
        if not new_row.params.penalised:
            continue
        if new_row.prompt_idx is not None and not 0 <= new_row.prompt_idx < len(prompts):
            raise ValueError(f"row {new_row.row} has prompt {new_row.prompt_idx} of {len(prompts)}; give it")
        seen = seen_in[new_row.prompt_idx] if new_row.prompt_idx is not None else np.zeros(0, np.int64)
        made, num_made = np.unique(np.frombuffer(new_row.output_ids, np.int32), return_counts=True)
        tokens = np.concatenate([seen, made])
        _check_vocabulary(new_row.row, tokens, vocab_size)
        added = np.concatenate([np.full(seen.size, _PROMPT_BIT), num_made])
        entries.append(np.stack([new_row.row * vocab_size + tokens, added]))
    return np.concatenate(entries, axis=1)


def _ban_masks(new_rows: Sequence[NewRow], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `RowEdits.bans` and `RowEdits.masks`. Rows with the same parameters share a mask."""
    mask_idx_of: dict[int, int] = {}  # id of the parameters → index of their mask
    rows: list[int] = []
    mask_idxs: list[int] = []
    masks: list[np.ndarray] = []
    for new_row in new_rows:
        params = new_row.params
        if params.allowed is None and not params.banned:
            continue
        if id(params) not in mask_idx_of:
            mask_idx_of[id(params)] = len(masks)
            is_allowed = np.full(_mask_bytes(vocab_size), 0 if params.allowed else 0xFF, np.uint8)
            if params.allowed is not None:
                is_allowed[: len(params.allowed.bits)] = np.frombuffer(params.allowed.bits, np.uint8)
            is_allowed[: len(params.banned.bits)] &= ~np.frombuffer(params.banned.bits, np.uint8)
            masks.append(is_allowed)
        rows.append(new_row.row)
        mask_idxs.append(mask_idx_of[id(params)])
    bits = np.concatenate(masks) if masks else np.zeros(0, np.uint8)
    return np.array([rows, mask_idxs], dtype=np.int64).ravel(), bits.view(np.int64)


def _mask_bytes(vocab_size: int) -> int:
    """Returns the bytes of a mask: a bit for each token, in whole words of 8 bytes."""
    return -(-vocab_size // 64) * 8


def _word_entries(new_rows: Sequence[NewRow], vocab_size: int) -> np.ndarray:
    """Returns `RowEdits.words`, of the banned words and of the tokens that may not end the row yet. A word's
    first tokens stand at the end of its beginning."""
    entries = []
    for new_row in new_rows:
        ends = new_row.stop_ids
        if len(ends) > MAX_END_IDS:
            raise ValueError(f"row {new_row.row} holds back {len(ends)} tokens; give at most {MAX_END_IDS}")
        _check_vocabulary(new_row.row, np.array(ends, dtype=np.int64), vocab_size)
        words = [*((_EVER, *word) for word in new_row.params.bad_words_ids)]
        words += [(new_row.may_stop_at, token) for token in ends]
        for word_idx, (until, *before, last) in enumerate(words):
            place = new_row.row * _MAX_WORDS + word_idx
            entries.append((place, until, last, *[_ANY] * (_TAIL - len(before)), *before))
    return np.array(entries, dtype=np.int64).reshape(-1, _TAIL + 3).T.ravel()


def _tail_entries(new_rows: Sequence[NewRow]) -> np.ndarray:
    """Returns `RowEdits.tails`, for the rows with words of several tokens. Before a row's first token stands
    one that is in no word."""
    entries = []
    for new_row in new_rows:
        if new_row.params.bad_words_ids:
            last = np.frombuffer(new_row.last_ids, np.int32)[-_TAIL:].tolist()
            entries.append((new_row.row, *[_ANY] * (_TAIL - len(last)), *last))
    return np.array(entries, dtype=np.int64).reshape(-1, _TAIL + 1).T.ravel()


def _check_vocabulary(row: int, tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise ValueError(
            f"row {row} has token ids from {tokens.min()} to {tokens.max()}; the vocabulary has {vocab_size}"
        )
