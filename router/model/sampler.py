"""Samples a step's tokens from its logits on the device, without a round trip to the host.

The sampler holds the sampling parameters and the last token of every row of the token table. `logit_edits.py`
changes logits, and `draw.py` draws tokens. Everything runs on the current stream. `sample`
neither synchronises nor has data-dependent shapes, so it can be captured in a CUDA graph.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightkv.errors import LightKVError
from lightkv.memory.staging import upload
from lightkv.router.engine.step import NewRow
from lightkv.router.sampling_params import MAX_LOGPROBS, SamplerKind, SamplingParams
from lightkv.triton_kernels.layers.ban_tokens import ban_tokens, ban_tokens_reference
from lightkv.triton_kernels.layers.draw import (
    MAX_VOCAB_SIZE,
    Draws,
    Settings,
    draw_tokens,
    draw_tokens_reference,
)

from .logit_edits import LogitEdits, Penalties, RowEdits

# One line of the parameter table, uploaded whole: 48 bytes, which the device sees as six int64.
_LINE = np.dtype(
    [
        ("row", "<i8"),  # the line's own number, so that one upload also says where the line goes
        ("seed", "<i8"),
        ("temperature", "<f4"),
        ("min_p", "<f4"),
        ("top_p", "<f4"),
        ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("top_k", "<i4"),
        ("unused", "<i4"),
    ]
)


class Sampled(NamedTuple):
    """The tokens of one step. Inside a CUDA graph they are in the graph's memory, and its next replay
    overwrites them.

    Log-probabilities are of the model's own distribution, before bias, penalties and temperature; -inf is
    possible. They are None below SamplerKind.EDITED.
    """

    tokens: Tensor  # int64 [B]
    logprobs: Tensor | None  # float32 [B], of `tokens`
    top_ids: Tensor | None  # int32 [B, min(20, vocab_size)], likeliest first
    top_logprobs: Tensor | None  # float32, of `top_ids`


class PromptScores(NamedTuple):
    """The log-probabilities of n tokens of prompts, and of the k likeliest in the place of each.

    They are of the model's own distribution, as in `Sampled`. `ranks`: 1 for the likeliest token.
    """

    logprobs: Tensor  # float32 [n]
    ranks: Tensor  # int32 [n]
    top_ids: Tensor  # int32 [n, k]
    top_logprobs: Tensor  # float32 [n, k]

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, num_top: int) -> "PromptScores":
        """Returns the scores of `targets`, int64 `[n]`, under `logits`, `[n, V]`, any float dtype; `num_top` is
        k."""
        scores = logits.float()
        log_mass = scores.logsumexp(dim=-1, keepdim=True)
        own = scores.gather(1, targets[:, None])
        ranks = (scores > own).sum(dim=-1, dtype=torch.int32) + 1
        top_scores, top_ids = scores.topk(min(num_top, scores.shape[1]), dim=-1)
        return cls((own - log_mass).squeeze(1), ranks, top_ids.to(torch.int32), top_scores - log_mass)

    @classmethod
    def joined(cls, parts: "Sequence[PromptScores]") -> "PromptScores":
        """Returns the scores of all parts, in order."""
        return cls(*(torch.cat(field) for field in zip(*parts, strict=True)))


class Sampler:
    """Sampling state on the device, one line per row of the token table; row 0 is padding and greedy.

    `next_token`, int64 `[num_rows]`, is the token that each row sampled last: the input ids of the next step.
    `agree`: gets the tokens of a step and overwrites them, as where several ranks draw and one of them counts:
    their logits may differ in the last bit.
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str,
        agree: Callable[[Tensor], object] | None = None,
    ) -> None:
        if num_rows < 2 or not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"a sampler of {num_rows} rows over {vocab_size} tokens; it takes at least 2 rows (row 0 is "
                f"padding) and a vocabulary of 1 to {MAX_VOCAB_SIZE}"
            )
        self.num_rows = num_rows
        self._agree = agree or (lambda tokens: None)
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # Made outside inference mode even if the caller is in it: such tensors can be written in either mode.
        with torch.inference_mode(False):
            self.next_token = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
            (lines,) = upload([_neutral_lines(num_rows).view(np.int64)], self.device)
            self._lines = lines.view(num_rows, -1).clone()
        self._logit_edits: LogitEdits | None = None

    @staticmethod
    def bytes_for(num_rows: int, vocab_size: int) -> int:
        """Returns the bytes of device memory that such a sampler uses once `enable_logit_edits` has run."""
        return num_rows * (8 + _LINE.itemsize + LogitEdits.bytes_per_row(vocab_size))

    def enable_logit_edits(self) -> None:
        """Allocates the buffers of the kind EDITED, unless they exist. Call it before a graph of this kind is
        captured."""
        if self._logit_edits is None:
            with torch.inference_mode(False):
                self._logit_edits = LogitEdits(self.num_rows, self.vocab_size, self.device)

    def set_rows(self, new_rows: Sequence[NewRow], prompts: Sequence[bytes] = ()) -> None:
        """Sets the rows of sequences that open or resume, in one upload. `prompts`: as in StepPlan.

        Raises InvalidParams for parameters that do not fit the vocabulary, and ValueError for rows outside
        1..num_rows-1 or given twice, seeds outside int64, token ids outside the vocabulary, or a missing
        prompt. A call that raises changes nothing.
        """
        if not new_rows:
            return
        rows = [new_row.row for new_row in new_rows]
        if min(rows) < 1 or max(rows) >= self.num_rows or len(set(rows)) < len(rows):
            raise ValueError(f"rows {rows}; give each once, from 1 to {self.num_rows - 1} (row 0 is padding)")
        for new_row in new_rows:
            new_row.params.validate(self.vocab_size)
        lines = np.concatenate([_line(new_row) for new_row in new_rows])
        edits = RowEdits.of(new_rows, prompts, self.vocab_size)

        if any(new_row.params.kind >= SamplerKind.EDITED for new_row in new_rows):
            self.enable_logit_edits()
        uploaded, *uploaded_edits = upload([lines.view(np.int64), *edits], self.device)
        uploaded = uploaded.view(len(new_rows), -1)
        row_ids = uploaded[:, 0]
        self._lines.index_copy_(0, row_ids, uploaded)
        if self._logit_edits is not None:
            self._logit_edits.set_rows(row_ids, *uploaded_edits)

    @torch.no_grad()
    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, kind: SamplerKind, masks: Tensor | None = None
    ) -> Sampled:
        """Draws one token per entry of the batch and stores it as its row's `next_token`.

        logits: `[B, vocab_size]`, any float dtype, not modified; rows: int64 `[B]`, only row 0 may repeat;
        positions: int64 `[B]`, of the tokens being drawn; kind: at least the highest of the rows' kinds; masks:
        int32 `[B, ceil(vocab_size / 32)]`, whose set bits are the tokens that may be drawn, or None for all.
        Log-probabilities are those without masks.
        Greedy rows take the lowest id among equal logits. A row whose logits hold NaN or +inf, or nothing but
        -inf, gets some token of the vocabulary. Raises ValueError if the shapes do not agree, and LightKVError
        for EDITED before `enable_logit_edits`.
        """
        if logits.shape != (rows.shape[0], self.vocab_size) or positions.shape != rows.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)}, rows {tuple(rows.shape)} and positions "
                f"{tuple(positions.shape)}; give [B, {self.vocab_size}], [B] and [B]"
            )
        if kind <= SamplerKind.RANDOM:
            scores = logits if masks is None else _ban(logits.clone(), masks)
            draws = None
            if kind == SamplerKind.RANDOM:
                draws = _draws(self._lines.index_select(0, rows), positions)
            tokens = _draw(scores, draws)
            self._agree(tokens)
            sampled = Sampled(tokens, None, None, None)
        else:
            sampled = self._sample_edited(logits, rows, positions, masks)
        self.next_token.index_copy_(0, rows, sampled.tokens)
        return sampled

    def rehearse(self, dtype: torch.dtype) -> None:
        """Launches what draws tokens, for the padding row: from logits of this type, and from float32, which
        edited logits are. So `compile_ahead` meets the kernels of every kind."""
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        for kind in (SamplerKind.GREEDY, SamplerKind.RANDOM):
            for one in {dtype, torch.float32}:
                self.sample(torch.zeros(1, self.vocab_size, dtype=one, device=self.device), row, row, kind)

    def check(self) -> None:
        """Checks the state between steps; synchronises. Raises LightKVError if a part of it is wrong."""
        lines = self._lines.cpu().numpy().view(_LINE)[:, 0]
        if not np.array_equal(lines["row"], np.arange(self.num_rows)):
            wrong = np.flatnonzero(lines["row"] != np.arange(self.num_rows))
            raise LightKVError(f"sampling rows {wrong} carry other rows' numbers; stop using this sampler")
        if lines[0] != _neutral_lines(1)[0]:
            raise LightKVError(f"the padding row 0 samples with {lines[0]}; never set row 0")
        last = self.next_token.cpu().numpy()
        if last.min() < 0 or last.max() >= self.vocab_size:
            raise LightKVError(
                f"the last tokens range from {last.min()} to {last.max()}, but the vocabulary has "
                f"{self.vocab_size}; write next_token through sample() only"
            )
        if self._logit_edits is not None:
            self._logit_edits.check()

    def _sample_edited(
        self, logits: Tensor, rows: Tensor, positions: Tensor, masks: Tensor | None
    ) -> Sampled:
        if self._logit_edits is None:
            raise LightKVError(
                "this SamplerKind needs buffers that do not exist yet; call enable_logit_edits() (before any "
                "capture), or set a row that needs them"
            )
        lines = self._lines.index_select(0, rows)
        scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        log_mass = scores.logsumexp(dim=-1, keepdim=True)  # [B, 1]
        top_scores, top_ids = scores.topk(min(MAX_LOGPROBS, self.vocab_size), dim=-1)
        penalties = Penalties(
            repetition=_real(lines, "repetition_penalty"),
            presence=_real(lines, "presence_penalty"),
            frequency=_real(lines, "frequency_penalty"),
        )
        self._logit_edits.apply_(scores, rows, positions, penalties)
        if masks is not None:
            _ban(scores, masks)
        tokens = _draw(scores, _draws(lines, positions))
        self._agree(tokens)
        self._logit_edits.count(rows, tokens)
        own_scores = logits.gather(1, tokens[:, None]).float()
        return Sampled(
            tokens, (own_scores - log_mass).squeeze(1), top_ids.to(torch.int32), top_scores - log_mass
        )


def _ban(scores: Tensor, masks: Tensor) -> Tensor:
    """Bans tokens in place, and returns the scores. Raises ValueError if the masks do not fit."""
    if scores.is_cuda:
        ban_tokens(scores, masks)
    else:
        ban_tokens_reference(scores, masks)
    return scores


def _draw(scores: Tensor, draws: Draws | None) -> Tensor:
    """Returns what `draw_tokens` returns, on any device."""
    return draw_tokens(scores, draws) if scores.is_cuda else draw_tokens_reference(scores, draws)


def _draws(lines: Tensor, positions: Tensor) -> Draws:
    """Returns how the tokens at these positions are drawn by these lines of the table."""
    reals = (_real(lines, "temperature"), _real(lines, "min_p"))
    top_k = lines.view(torch.int32)[:, _LINE.fields["top_k"][1] // 4, None]  # type: ignore[index]
    return Draws(Settings(*reals, top_k, _real(lines, "top_p")), lines[:, 1], positions)


def _real(lines: Tensor, field: str) -> Tensor:
    column = _LINE.fields[field][1] // 4  # type: ignore[index]
    return lines.view(torch.float32)[:, column, None]  # [B, 1]


def _neutral_lines(num_rows: int) -> np.ndarray:
    """Returns greedy lines without bias or penalty, for the padding row and for rows not yet used."""
    lines = np.repeat(_line(NewRow(0, SamplingParams(temperature=0.0), seed=0)), num_rows)
    lines["row"] = np.arange(num_rows)
    return lines


def _line(new_row: NewRow) -> np.ndarray:
    params = new_row.params
    if not -(2**63) <= new_row.seed < 2**63:
        raise ValueError(f"row {new_row.row} has seed {new_row.seed}; give a signed integer of 64 bits")
    line = np.zeros(1, _LINE)
    line["row"], line["seed"] = new_row.row, new_row.seed
    line["top_p"] = 1.0
    if not params.greedy:
        line["temperature"], line["min_p"] = params.temperature, params.min_p
        line["top_p"], line["top_k"] = params.top_p, params.top_k
    line["repetition_penalty"] = params.repetition_penalty
    line["presence_penalty"] = params.presence_penalty
    line["frequency_penalty"] = params.frequency_penalty
    return line
