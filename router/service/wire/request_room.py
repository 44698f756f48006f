"""The memory that clients' requests may take in the router, and in its stream from an API process."""

import msgspec

from lightkv.errors import CheckFailed, LightKVError
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.service.messages import Submit

# Bytes of all requests that have not ended. 4,096 requests of 16,000 tokens fit.
MAX_REQUEST_BYTES = 256 * 2**20
ANSWER_BYTES = 2**11  # of one answer in the router's queues and tables, without what its request shares
_OBJECT_SHARE = (
    12  # decoded lists and dictionaries of numbers take at most so many times their message's bytes
)
_TEXT_BYTES = 4  # of a character, at most


class NoRoom(LightKVError):
    """There is no room for a request. `is_too_large`: there never will be, whatever ends before."""

    def __init__(self, num_bytes: int, num_taken: int, limit: int) -> None:
        self.is_too_large = num_bytes > limit
        if self.is_too_large:
            remedy = "send fewer prompts or answers at once, or shorter ones"
        else:
            remedy = f"the requests before it have taken {num_taken}; try again in a moment"
        super().__init__(
            f"the request takes {num_bytes} of the router's {limit} bytes for requests; {remedy}"
        )


class Claim:
    """The bytes that one submission has claimed, until the last of its answers has ended."""

    __slots__ = ("num_bytes", "num_living")

    def __init__(self, num_bytes: int, num_living: int) -> None:
        self.num_bytes = num_bytes
        self.num_living = num_living


class RequestRoom:
    """Counts the bytes of the requests that have not ended, and refuses those beyond `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_REQUEST_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def claim(self, submit: Submit) -> Claim:
        """Reserves what the requests of `submit` take. Raises NoRoom, also where they alone take too much."""
        num_bytes = request_bytes(submit)
        if self.num_bytes + num_bytes > self.max_bytes:
            raise NoRoom(num_bytes, self.num_bytes, self.max_bytes)
        self.num_bytes += num_bytes
        return Claim(num_bytes, submit.num_answers)

    def end(self, claim: Claim, num_answers: int = 1) -> None:
        """Notes that answers have ended. The last one returns the claim's bytes."""
        claim.num_living -= num_answers
        if not claim.num_living:
            self.num_bytes -= claim.num_bytes

    def check(self, claims: list[Claim]) -> None:
        """Recounts the bytes over the claim of each answer that has not ended. Raises CheckFailed."""
        distinct = {id(claim): claim for claim in claims}.values()
        total = sum(claim.num_bytes for claim in distinct)
        living = sum(claim.num_living for claim in distinct)
        if total != self.num_bytes or living != len(claims):
            raise CheckFailed(
                f"requests are counted with {self.num_bytes} bytes and {living} answers; a recount finds "
                f"{total} bytes and {len(claims)} answers"
            )


def request_bytes(submit: Submit) -> int:
    """Returns how many bytes the requests of `submit` take in the router at most, with the log-probabilities of
    their prompts."""
    params = submit.params
    prompts = sum(len(prompt.prompt_ids) for prompt in submit.prompts)
    scores = 0
    if params.prompt_logprobs is not None:
        scores = prompts // TOKEN_BYTES * 8 * (params.prompt_logprobs + 1)
    packed = len(params.banned.bits)
    if params.allowed is not None:
        packed += len(params.allowed.bits)
    if params.grammar is not None:
        packed += _TEXT_BYTES * len(params.grammar.text)
    rest = msgspec.structs.replace(params, allowed_token_ids=None, banned_token_ids=(), grammar=None)
    others = len(_encode((rest, submit.stop_ids, submit.namespace, submit.session)))
    return prompts + scores + packed + _OBJECT_SHARE * others + ANSWER_BYTES * submit.num_answers


_encode = msgspec.msgpack.encode
