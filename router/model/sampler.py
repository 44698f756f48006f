"""Sampling on the device: from a step's logits to its tokens, with no host in between.

Knows the sampling parameters, the last token and, where asked for, the token counts of every row of the token
table. Knows no request, no text and no K/V; which rows run, and when one ends, is decided elsewhere.

A token is drawn by inverting the cumulative distribution in vocabulary order at one uniform number per row,
which depends on (seed, position) alone. Probabilities become integers first, weight = floor(2^40 p / max p):
integer sums are exact in any order, so that a draw depends neither on the batch, nor on the kind, nor on how
a device adds up, and a token of weight zero is never drawn. A token loses less than 2^-40 of the likeliest
token's probability by it; float32 sums over a large vocabulary lose more and may even decrease.

Everything runs on the current stream. `sample` neither synchronises nor has data-dependent shapes, and can be
captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightkv.errors import LightKVError
from lightkv.router.engine.step import NewRow
from lightkv.router.sampling_params import (
    MAX_END_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    SamplerKind,
    SamplingParams,
)

MAX_VOCAB_SIZE = 2**22  # times the largest weight, 2^40, it stays within int64
_WEIGHT_SCALE = 2.0**40
_PROMPT_BIT = 1 << 30  # of a token count: the prompt holds the token; the bits below count it in the output
_COUNT_MASK = _PROMPT_BIT - 1

# One line of the parameter table, uploaded whole: 48 bytes, seen by the device as six int64.
_LINE = np.dtype(
    [
        ("row", "<i8"),  # the line's own number, so that one upload also says where it goes
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
    """What one step drew. From a CUDA graph: the graph's own memory, overwritten by its next replay.

    Log-probabilities are of the model's own distribution, before bias, penalties and temperature; -inf is
    possible. They are None below SamplerKind.EDITED.
    """

    tokens: Tensor  # int64 [B]
    logprobs: Tensor | None  # float32 [B], of `tokens`
    top_ids: Tensor | None  # int32 [B, min(20, vocab_size)], likeliest first
    top_logprobs: Tensor | None  # float32, of `top_ids`


class Sampler:
    """Sampling state on the device, one line per row of the token table; row 0 is padding and greedy.

    `next_token` int64 `[num_rows]` is what each row sampled last: the input ids of the next step.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        if num_rows < 2 or not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"a sampler of {num_rows} rows over {vocab_size} tokens; it takes at least 2 rows (row 0 is "
                f"padding) and a vocabulary of 1 to {MAX_VOCAB_SIZE}"
            )
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        # Made outside inference mode, for a caller inside it: such tensors can be written in either.
        with torch.inference_mode(False):
            self.next_token = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
            self._lines = self._upload(_neutral_lines(num_rows).view(np.int64).reshape(num_rows, -1)).clone()
        self._edits: _LogitEdits | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the buffers hold now."""
        return self.next_token.nbytes + self._lines.nbytes + (self._edits.num_bytes if self._edits else 0)

    @staticmethod
    def bytes_for(num_rows: int, vocab_size: int) -> int:
        """Bytes of device memory that such a sampler's buffers hold at most: once `enable_edits` has run.

        A row has its next token, its line, 4 per token of the vocabulary for the counts, 8 per entry for the
        logit bias, and for the tokens that end it 8 per entry and 8 more.
        """
        edits = 4 * vocab_size + 8 * MAX_LOGIT_BIAS + 8 * MAX_END_IDS + 8
        return num_rows * (8 + _LINE.itemsize + edits)

    def enable_edits(self) -> None:
        """Allocates what kinds from EDITED on need, once. To be called before such a graph is captured."""
        if self._edits is None:
            with torch.inference_mode(False):
                self._edits = _LogitEdits(self.num_rows, self.vocab_size, self.device)

    def set_rows(self, settings: Sequence[NewRow], prompts: Sequence[bytes] = ()) -> None:
        """Sets the rows of sequences that open or resume, in one upload (up to four with bias, penalties or
        min_tokens). `prompts`: as in StepPlan.

        Raises InvalidParams for parameters that do not fit the vocabulary, and ValueError for rows outside
        1..num_rows-1 or given twice, seeds outside int64, token ids outside the vocabulary, or a prompt that is
        not given; nothing has changed then.
        """
        if not settings:
            return
        rows = [setting.row for setting in settings]
        if min(rows) < 1 or max(rows) >= self.num_rows or len(set(rows)) < len(rows):
            raise ValueError(f"rows {rows}; give each once, from 1 to {self.num_rows - 1} (row 0 is padding)")
        for setting in settings:
            setting.params.validate(self.vocab_size)
        lines = np.concatenate([_line(setting) for setting in settings])
        biases = _bias_entries(settings)
        counts = _count_entries(settings, prompts, self.vocab_size)
        ends = _end_entries(settings, self.vocab_size)

        if any(setting.params.kind >= SamplerKind.EDITED for setting in settings):
            self.enable_edits()
        uploaded = self._upload(lines.view(np.int64).reshape(len(settings), -1))
        row_ids = uploaded[:, 0]
        self._lines.index_copy_(0, row_ids, uploaded)
        if self._edits is not None:
            self._edits.clear(row_ids)
            if biases.size:
                self._edits.set_bias(self._upload(biases))
            if counts.size:
                self._edits.set_counts(self._upload(counts))
            if ends.size:
                self._edits.set_ends(self._upload(ends))

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, kind: SamplerKind) -> Sampled:
        """Draws one token per entry of the batch and notes it as its row's `next_token`.

        logits `[B, vocab_size]`, any float dtype, left as they are; rows int64 `[B]`, each once but for 0;
        positions int64 `[B]` of the tokens being drawn; kind: at least the highest of the rows' kinds.
        Ties of greedy rows go to the lowest id. A row with NaN, +inf or nothing but -inf among its logits
        gets some token of the vocabulary. Raises ValueError where the shapes do not agree, and LightKVError
        from EDITED on before `enable_edits`.
        """
        if logits.shape != (rows.shape[0], self.vocab_size) or positions.shape != rows.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)}, rows {tuple(rows.shape)} and positions "
                f"{tuple(positions.shape)}; give [B, {self.vocab_size}], [B] and [B]"
            )
        if kind == SamplerKind.GREEDY:
            sampled = Sampled(logits.argmax(dim=-1), None, None, None)
        elif kind == SamplerKind.RANDOM:
            lines = self._lines.index_select(0, rows)
            sampled = Sampled(_draw(_scores(logits), lines, positions), None, None, None)
        else:
            sampled = self._sample_edited(logits, rows, positions, truncated=kind == SamplerKind.FULL)
        self.next_token.index_copy_(0, rows, sampled.tokens)
        return sampled

    def check(self) -> None:
        """Recounts what must hold between steps; synchronises. Raises LightKVError with what does not."""
        lines = self._lines.cpu().numpy().view(_LINE)[:, 0]
        if not np.array_equal(lines["row"], np.arange(self.num_rows)):
            wrong = np.flatnonzero(lines["row"] != np.arange(self.num_rows))
            raise LightKVError(f"sampling rows {wrong} carry other rows' numbers; stop using this sampler")
        if lines[0] != _neutral_lines(1)[0]:
            raise LightKVError(f"the padding row 0 samples with {lines[0]}; nothing may set it")
        last = self.next_token.cpu().numpy()
        if last.min() < 0 or last.max() >= self.vocab_size:
            raise LightKVError(
                f"last tokens lie within {last.min()}..{last.max()}, the vocabulary has {self.vocab_size}; "
                "write next_token through sample() only"
            )
        if self._edits is not None:
            self._edits.check()

    def _sample_edited(self, logits: Tensor, rows: Tensor, positions: Tensor, truncated: bool) -> Sampled:
        if self._edits is None:
            raise LightKVError(
                "a SamplerKind from EDITED on before its buffers exist; call enable_edits() (before any "
                "capture), or set a row that needs it"
            )
        lines = self._lines.index_select(0, rows)
        scores = _scores(logits)
        log_mass = scores.logsumexp(dim=-1, keepdim=True)  # [B, 1]
        top_scores, top_ids = scores.topk(min(MAX_LOGPROBS, self.vocab_size), dim=-1)
        self._edits.apply_(scores, rows, lines, positions)
        tokens = _draw(scores, lines, positions, truncated)
        self._edits.add(rows, tokens)
        own_scores = logits.gather(1, tokens[:, None]).float()
        return Sampled(
            tokens, (own_scores - log_mass).squeeze(1), top_ids.to(torch.int32), top_scores - log_mass
        )

    def _upload(self, array: np.ndarray) -> Tensor:
        """Copies to the device without waiting: the pinned copy lives until the transfer is done."""
        tensor = torch.from_numpy(array)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)


class _LogitEdits:
    """What changes logits before they are drawn from: per row, a logit bias, the counts of tokens seen, and the
    tokens that would end the answer before it may end."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(num_rows, MAX_LOGIT_BIAS, dtype=torch.float32, device=device)
        # Unused entries add 0 to different tokens: all to one would queue up at its address.
        unused = torch.arange(MAX_LOGIT_BIAS, dtype=torch.int32, device=device).remainder_(vocab_size)
        self._bias_ids = unused.repeat(num_rows, 1)
        self._end_ids = self._bias_ids[:, :MAX_END_IDS].contiguous()
        self._end_bias = torch.zeros(num_rows, MAX_END_IDS, dtype=torch.float32, device=device)
        self._may_end_at = torch.zeros(num_rows, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        counts_and_bias = self._counts.nbytes + self._bias.nbytes + self._bias_ids.nbytes
        return counts_and_bias + self._end_ids.nbytes + self._end_bias.nbytes + self._may_end_at.nbytes

    def clear(self, rows: Tensor) -> None:
        self._counts.index_fill_(0, rows, 0)
        self._bias.index_fill_(0, rows, 0.0)
        self._end_bias.index_fill_(0, rows, 0.0)

    def set_bias(self, entries: Tensor) -> None:
        """entries float64 `[3, N]`: place in the flattened bias buffers, token id, bias."""
        places = entries[0].long()
        self._bias_ids.view(-1).index_copy_(0, places, entries[1].to(torch.int32))
        self._bias.view(-1).index_copy_(0, places, entries[2].to(torch.float32))

    def set_counts(self, entries: Tensor) -> None:
        """entries int64 `[2, N]`: place in the flattened counts, what to add to it."""
        self._counts.view(-1).scatter_add_(0, entries[0], entries[1].to(torch.int32))

    def set_ends(self, entries: Tensor) -> None:
        """entries int64 `[4, N]`: row, position from which it may end, place in the row's tokens, token id."""
        rows, positions, places, token_ids = entries.unbind()
        self._may_end_at.index_copy_(0, rows, positions)  # a row's entries all say the same
        places = rows * MAX_END_IDS + places
        self._end_ids.view(-1).index_copy_(0, places, token_ids.to(torch.int32))
        self._end_bias.view(-1).index_fill_(0, places, -torch.inf)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts one more output token per row. Row 0 counts the padding's: nobody reads them."""
        places = rows * self._counts.shape[1] + tokens
        self._counts.view(-1).scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def apply_(self, scores: Tensor, rows: Tensor, lines: Tensor, positions: Tensor) -> None:
        """In place on float32 `[B, V]`: bias, then the repetition penalty, then presence and frequency, then
        -inf for the tokens that would end an answer too early.

        The repetition penalty as in arXiv 1909.05858 section 4.1, for negative scores as in Hugging Face's
        RepetitionPenaltyLogitsProcessor; the others as in OpenAI's API reference. Neutral parameters leave
        every bit of a score alone, whatever the counts.
        """
        scores.scatter_add_(1, self._bias_ids.index_select(0, rows).long(), self._bias.index_select(0, rows))
        counts = self._counts.index_select(0, rows)  # [B, V]
        penalty = _real(lines, "repetition_penalty")
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        torch.where(counts != 0, penalised, scores, out=scores)
        num_outputs = counts.bitwise_and_(_COUNT_MASK)
        scores.sub_(num_outputs * _real(lines, "frequency_penalty"))
        scores.sub_((num_outputs > 0) * _real(lines, "presence_penalty"))
        is_early = (positions < self._may_end_at.index_select(0, rows))[:, None]
        end_bias = self._end_bias.index_select(0, rows)
        end_bias = torch.where(is_early, end_bias, torch.zeros_like(end_bias))
        scores.scatter_add_(1, self._end_ids.index_select(0, rows).long(), end_bias)

    def check(self) -> None:
        if bool((self._bias[0] != 0).any()) or bool((self._end_bias[0] != 0).any()):
            raise LightKVError(
                "the padding row 0 has a logit bias, or tokens that it may not end with; nothing may set them"
            )
        if bool((self._counts[1:] < 0).any()):
            raise LightKVError("a token count has overflowed; a row was not set when its sequence opened")


def _scores(logits: Tensor) -> Tensor:
    """A float32 copy to work on in place."""
    return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _draw(scores: Tensor, lines: Tensor, positions: Tensor, truncated: bool = False) -> Tensor:
    """Tokens int64 `[B]` from float32 scores `[B, V]`, which are used up. truncated: by top-k and top-p."""
    temperature = _real(lines, "temperature")
    best_score, best = scores.max(dim=-1, keepdim=True)  # the first of equals
    weights = token_weights_(scores, best_score, temperature, _real(lines, "min_p"))
    if truncated:
        truncate_(weights, _integer(lines, "top_k"), _real(lines, "top_p"))
    drawn = pick(weights, uniforms(lines[:, 1], positions))
    return torch.where(temperature > 0, drawn, best).squeeze(1)


def token_weights_(scores: Tensor, best_score: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Turns scores into p / max p, in place, 0 where that is below min_p. float32 `[B, V]` and `[B, 1]`.

    Relative to the likeliest token, min-p is a comparison and no sum over the vocabulary is needed. Rows of
    temperature 0 get the weights of temperature 1; their token is the argmax.
    """
    weights = scores.sub_(best_score).div_(temperature.masked_fill(temperature == 0, 1.0)).exp_()
    return weights.masked_fill_(weights < min_p, 0.0)


def truncate_(weights: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Sets to 0, in place, what top-k (int32 `[B, 1]`, below 1 is all) and then top-p (float32) leave out.

    Tokens as likely as the k-th stay. top-p keeps the smallest set of what top-k left whose share is at least
    top_p; of equally likely tokens the lowest ids.
    """
    vocab_size = weights.shape[1]
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp_(max=vocab_size).long()
    ordered.masked_fill_(ordered < ordered.gather(1, k - 1), 0.0)

    mass = _cumulative(ordered)
    total = mass[:, -1:]
    # Rounded up to an integer, and the total itself at 1: float64 cannot hold every int64.
    enough = torch.where(top_p < 1, (top_p.double() * total).ceil_().long(), total)
    ordered[:, 1:].masked_fill_(mass[:, :-1] >= enough, 0.0)
    # Back to vocabulary order, in which rows without top-k and top-p are drawn too: one draw for both.
    weights.scatter_(1, ids, ordered)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds the share `uniform` of the total; int64 `[B, 1]`.

    weights float32 `[B, V]`, 0 to 1; uniform float64 `[B]`, in [0, 1).
    """
    mass = _cumulative(weights)
    # Below the total in float64 too: a uniform is at most 1 - 2^-53, so the product loses a whole ulp.
    target = (uniform[:, None] * mass[:, -1:]).long()
    return torch.searchsorted(mass, target, right=True).clamp_(max=weights.shape[1] - 1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number of [0, 1) per row, float64 `[B]`, from int64 `[B]` seeds and positions and nothing else.

    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) whose state
    starts at the mixed seed, so that neighbouring seeds have unrelated streams, and is entered at `position`.
    """
    state = _mix(_mix(seeds) + positions * -0x61C8864680B583EB)
    return _shift_right(state, 11).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 stands for uint64, and its products wrap. Constants as signed numbers."""
    state = (state ^ _shift_right(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _shift_right(state, 27)) * -0x6B2FB644ECCEEE15
    return state ^ _shift_right(state, 31)


def _shift_right(state: Tensor, num_bits: int) -> Tensor:
    """The logical shift: int64 shifts its sign in, which is masked away."""
    return (state >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _cumulative(weights: Tensor) -> Tensor:
    return weights.mul(_WEIGHT_SCALE).long().cumsum_(dim=-1)  # int64 [B, V]


def _real(lines: Tensor, field: str) -> Tensor:
    column = _LINE.fields[field][1] // 4  # type: ignore[index]
    return lines.view(torch.float32)[:, column, None]  # [B, 1]


def _integer(lines: Tensor, field: str) -> Tensor:
    column = _LINE.fields[field][1] // 4  # type: ignore[index]
    return lines.view(torch.int32)[:, column, None]  # [B, 1]


def _neutral_lines(num_rows: int) -> np.ndarray:
    """Greedy, without bias or penalty: the padding row, and rows that no sequence has had yet."""
    lines = np.repeat(_line(NewRow(0, SamplingParams(temperature=0.0), seed=0)), num_rows)
    lines["row"] = np.arange(num_rows)
    return lines


def _line(setting: NewRow) -> np.ndarray:
    params = setting.params
    if not -(2**63) <= setting.seed < 2**63:
        raise ValueError(f"row {setting.row} has seed {setting.seed}; give an integer of 64 bits, signed")
    line = np.zeros(1, _LINE)
    line["row"], line["seed"] = setting.row, setting.seed
    line["temperature"] = 0.0 if params.greedy else params.temperature
    line["min_p"], line["top_p"], line["top_k"] = params.min_p, params.top_p, params.top_k
    line["repetition_penalty"] = params.repetition_penalty
    line["presence_penalty"] = params.presence_penalty
    line["frequency_penalty"] = params.frequency_penalty
    return line


def _bias_entries(settings: Sequence[NewRow]) -> np.ndarray:
    """What `_LogitEdits.set_bias` takes. float64 holds places, ids and biases exactly, so one array does."""
    entries = [
        (setting.row * MAX_LOGIT_BIAS + entry_idx, token, bias)
        for setting in settings
        for entry_idx, (token, bias) in enumerate(setting.params.logit_bias.items())
    ]
    return np.array(entries, dtype=np.float64).reshape(-1, 3).T.copy()


def _count_entries(settings: Sequence[NewRow], prompts: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """What `_LogitEdits.set_counts` takes, for the rows whose parameters look at counts."""
    seen_in = [np.frombuffer(prompt, np.int32).astype(np.int64) for prompt in prompts]
    entries = [np.zeros((2, 0), np.int64)]
    for setting in settings:
        if not setting.params.penalised:
            continue
        if setting.prompt_idx is not None and not 0 <= setting.prompt_idx < len(prompts):
            raise ValueError(f"row {setting.row} has prompt {setting.prompt_idx} of {len(prompts)}; give it")
        seen = seen_in[setting.prompt_idx] if setting.prompt_idx is not None else np.zeros(0, np.int64)
        made, num_made = np.unique(np.frombuffer(setting.output_ids, np.int32), return_counts=True)
        tokens = np.concatenate([seen, made])
        _check_vocabulary(setting.row, tokens, vocab_size)
        added = np.concatenate([np.full(seen.size, _PROMPT_BIT), num_made])
        entries.append(np.stack([setting.row * vocab_size + tokens, added]))
    return np.concatenate(entries, axis=1)


def _end_entries(settings: Sequence[NewRow], vocab_size: int) -> np.ndarray:
    """What `_LogitEdits.set_ends` takes, for the rows that may not end yet."""
    entries = [
        (setting.row, setting.may_stop_at, place, token)
        for setting in settings
        for place, token in enumerate(setting.stop_ids)
    ]
    array = np.array(entries, dtype=np.int64).reshape(-1, 4)
    for setting in settings:
        if len(setting.stop_ids) > MAX_END_IDS:
            raise ValueError(
                f"row {setting.row} holds back {len(setting.stop_ids)} tokens; give at most {MAX_END_IDS}"
            )
        _check_vocabulary(setting.row, np.array(setting.stop_ids, dtype=np.int64), vocab_size)
    return array.T.copy()


def _check_vocabulary(row: int, tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        raise ValueError(
            f"row {row} has token ids within {tokens.min()}..{tokens.max()}; the vocabulary has {vocab_size}"
        )
