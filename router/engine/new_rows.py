"""Collects at admission what the sampler needs of new sequences, to send it with the next plan."""

import numpy as np
from msgspec.structs import replace

from lightkv.ledger.prefix_tree import TOKEN_BYTES

from .request import Request
from .step import NewRow


class NewRows:
    """The rows that the next plan introduces, and the prompts that their penalties look at.

    `vocab_size`: token ids are below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[NewRow] = []
        self._prompts: dict[bytes, int] = {}  # prompt → its index in the next plan's `prompts`

    def add(self, request: Request, row: int) -> None:
        """Introduces `request` in `row`. Token ids are sent only if the request's sampling reads them."""
        params = request.params
        new = NewRow(row, params, request.seed, grammar=request.grammar)
        if params.penalised:
            prompt_idx = self._prompts.setdefault(request.prompt_ids, len(self._prompts))
            new = replace(new, prompt_idx=prompt_idx)
        if params.penalised or request.grammar is not None:
            new = replace(new, output_ids=request.output.tobytes())
        if num_last := max(map(len, params.bad_words_ids), default=1) - 1:
            new = replace(new, last_ids=request.prefill_ids[-num_last * TOKEN_BYTES :])
        if len(request.output) < params.min_tokens:
            stop_ids = sorted(one for one in request.stop_ids if one < self._vocab_size)
            new = replace(new, may_stop_at=request.num_prompt + params.min_tokens, stop_ids=stop_ids)
        self._rows.append(new)

    def drain(self) -> tuple[list[NewRow], list[bytes]]:
        """Returns the rows and the prompts of `StepPlan` that were added since the last call."""
        rows, prompts = self._rows, [distinct_ids(ids, self._vocab_size) for ids in self._prompts]
        self._rows, self._prompts = [], {}
        return rows, prompts


def distinct_ids(prompt_ids: bytes, vocab_size: int) -> bytes:
    """Returns the token ids of a prompt, each once and ascending; both are int32 bytes."""
    is_seen = np.zeros(vocab_size, dtype=bool)
    is_seen[np.frombuffer(prompt_ids, dtype=np.int32)] = True
    return np.flatnonzero(is_seen).astype(np.int32).tobytes()
