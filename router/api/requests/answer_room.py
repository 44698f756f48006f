"""How many log-probabilities and bytes the answers to one request may have together.

Most limits are for one prompt or one answer. These count what a client multiplies: prompts, answers to each,
their tokens, and what answers repeat of prompts. They are checked before anything is computed.
"""

from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.api.answers.extras import Extras
from lightkv.router.api.answers.generation import GenerationSpec
from lightkv.router.engine.request import MAX_SCORES
from lightkv.router.sampling_params import InvalidParams

MAX_ANSWER_BYTES = 256 * 2**20  # of JSON, where a log-probability and a token count with these bytes:
SCORE_BYTES, ID_BYTES = 64, 8
_KEPT_BYTES = 8  # of a log-probability while its answer is made and written


def kept_bytes(spec: GenerationSpec) -> int:
    """Returns the bytes of the prompts' log-probabilities, which are kept until the answer is written."""
    top = spec.params.prompt_logprobs
    return 0 if top is None else _KEPT_BYTES * (top + 1) * _num_tokens(spec)


def most_tokens(spec: GenerationSpec, extras: Extras, least: int) -> int:
    """Returns how many tokens each answer of `spec` may have, so that all of them keep the limits.

    `extras`: what the answers have beside their tokens. `least`: how many tokens each answer needs. Raises
    InvalidParams if there is no room for so many.
    """
    params = spec.params
    num_answers = len(spec.prompts) * params.n
    num_repeated = _num_tokens(spec) * extras.num_repeats
    num_scores = num_repeated * ((params.prompt_logprobs or 0) + 1)
    num_scores *= extras.prompt_logprobs + extras.echoes_logprobs
    num_bytes = sum(len(echo.text.encode()) for echo in extras.echoed) * extras.num_repeats
    num_bytes += num_scores * SCORE_BYTES + num_repeated * extras.token_ids * ID_BYTES
    token_scores = params.logprobs + 1 if spec.shows_logprobs and params.logprobs is not None else 0
    token_bytes = token_scores * SCORE_BYTES + (1 + extras.token_ids) * ID_BYTES
    what = f"{num_answers} answers of {least} tokens to {len(spec.prompts)} prompts have"
    total = num_scores + num_answers * least * token_scores
    if total > MAX_SCORES:
        field = "prompt_logprobs" if extras.prompt_logprobs else "logprobs"
        allowed = (
            f"fewer, or fewer or shorter prompts and answers: {what} {total} log-probabilities, and "
            f"{MAX_SCORES} are allowed in one request"
        )
        raise InvalidParams(field, getattr(params, field), allowed)
    total = num_bytes + num_answers * least * token_bytes
    if total > MAX_ANSWER_BYTES:
        allowed = (
            f"fewer, or fewer or shorter prompts: {what} some {total} bytes, and {MAX_ANSWER_BYTES} are "
            "allowed in one request"
        )
        raise InvalidParams("n", params.n, allowed)
    most = (MAX_ANSWER_BYTES - num_bytes) // (num_answers * token_bytes)
    if token_scores:
        most = min(most, (MAX_SCORES - num_scores) // (num_answers * token_scores))
    return most


def _num_tokens(spec: GenerationSpec) -> int:
    """Returns the number of tokens of all prompts."""
    return sum(map(len, spec.prompts)) // TOKEN_BYTES
