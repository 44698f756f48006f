"""The settings of a simulation, from which the command line makes its options."""

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from lightkv.errors import LightKVError
from lightkv.layer_groups import FULL, ONE_GROUP, LayerGroups, Lifetime
from lightkv.router.config import ADMISSIONS, MAX_SECONDS, SECONDS, require_allowed, setting

from .routing import BLOCK_TOKENS, BUSY_FACTOR, ROUTINGS
from .trace_files import BLOCK, TIME_UNITS, Reading

PAGE_SIZES = (16, 32, 64, 128, 256)  # that the benchmarks compare; any other can be simulated
ALLOCATIONS = ("token", "contiguous", *(f"paged:{size}" for size in PAGE_SIZES))
MAX_RATE = 1e9  # requests per second, and as a multiple
# The service's own, and others for comparison (`admissions.py`).
SIMULATED_ADMISSIONS = (
    *ADMISSIONS,
    "provisional",
    "quantile",
    "past-future",
    "moving-average",
    "watermark",
    "sum",
    "oracle",
)
UNIFORM_ADMISSIONS = ("watermark", "sum")  # count tokens that all layers hold until a request ends
LAYERS = re.compile(r"([1-9][0-9]{0,2})x(?:full|(window|chunk):([1-9][0-9]{0,8}))")


class InvalidSimulation(LightKVError, ValueError):
    """Raised for a setting out of its range, an allocation that is unknown or does not fit the pool, or a
    request of the trace that could never run."""


@dataclass(frozen=True)
class SimulationConfig:
    """Every setting of a simulation."""

    allocation: str = setting(
        "token",
        "token; paged:N, pages of N tokens; contiguous (prompt and --max-new reserved in one run). Several, "
        "as in token,paged:16,paged:64, are simulated on the same requests and compared.",
    )
    admission: str | None = setting(
        None,
        f"How requests are admitted. As in the service: {', '.join(ADMISSIONS)}. For comparison: provisional "
        "(guaranteed, but without guarantees), quantile "
        "(estimates all lengths, and may preempt all), past-future and moving-average (other estimates of "
        "output lengths), watermark (counts prompts only, up to 99 % of the pool), sum (counts prompt + "
        "max_tokens of each request), oracle (reserved, and knows the true length of each answer). Several, as "
        "in timely,watermark, are compared. Default: guaranteed; for contiguous it is sum, the only one.",
        choices=SIMULATED_ADMISSIONS,
    )
    layers: str = setting(
        "",
        "What the model's layers see, for the allocation token: 8xfull,40xwindow:1024, say, or "
        "12xfull,36xchunk:8192. The pool has the bytes of --capacity tokens in all layers. Default: all see "
        "everything.",
    )
    capacity: Annotated[int, Meta(ge=1)] = setting(120_000, "Tokens that the K/V pool holds.")
    states: Annotated[int, Meta(ge=0)] = setting(
        0,
        "State slots of a model with recurrent layers, beside the tokens, for the allocation token: each "
        "running request takes one, and the others keep states after prefixes. 0: a model without.",
    )
    max_num_seqs: Annotated[int, Meta(ge=1)] = setting(256, "The most requests that run at once.")
    prefill_chunk: Annotated[int, Meta(ge=0)] = setting(
        4096, "The most prompt tokens of a step; 0: no limit, unless --itl-target is given."
    )
    max_new: Annotated[int, Meta(ge=1)] = setting(
        4096, "The most output tokens of a request (max_tokens), which traces do not state."
    )
    stated: Annotated[float, Meta(ge=0, le=1, title="a share")] = setting(
        1.0,
        "Share of the requests, drawn at random, that state --max-new as their max_tokens. The others state "
        "none: their answers are cut at --max-new all the same, but the scheduler does not know it.",
    )
    requests: Annotated[int, Meta(ge=1)] | None = setting(
        None, "Number of requests; a file that ends is repeated. Default: all of a file, 2000 of a workload."
    )
    time_unit: str | None = setting(
        None,
        f"Unit of the times of a file with Mooncake's names: {', '.join(TIME_UNITS)}. Mooncake's own have ms.",
        choices=tuple(TIME_UNITS),
    )
    block_tokens: Annotated[int, Meta(ge=1)] = setting(
        BLOCK, "Tokens of a block of hash_ids; Mooncake's have 512."
    )
    load: Annotated[float, Meta(gt=0, le=MAX_RATE)] | None = setting(
        None,
        "Arrival rate, as a multiple of the rate that an oracle serves when all requests wait at the start "
        "(this is simulated first). Default: the trace's own times, or 1.0 if it has none.",
    )
    rate: Annotated[float, Meta(gt=0)] | None = setting(
        None, "Arrival rate in requests per second; inf: all at the start."
    )
    saturation: Annotated[float, Meta(gt=0, le=MAX_RATE)] | None = setting(
        None, "For --load: the requests per second that an oracle serves, if this is known already."
    )
    ttft_target: Annotated[float, SECONDS] = setting(
        10.0, "For goodput: the most seconds to the first token."
    )
    itl_target: Annotated[float, Meta(ge=0, le=MAX_SECONDS, title="seconds")] | None = setting(
        None,
        "The most seconds of a step with prompts beside decodes, which then has fewer prompt tokens, as in the "
        "service; 0: no target. Default: that of a service on a GPU, which depends on the prompts that wait.",
    )
    tpot_target: Annotated[float, SECONDS] = setting(
        0.1, "For goodput: the most seconds between tokens, a request's mean."
    )
    patience: Annotated[float, SECONDS] | None = setting(
        None,
        "Seconds of waiting after which a request goes behind requests that have waited less. Default: first "
        "come, first served; for timely, 0.8 of --ttft-target.",
    )
    reserve: Annotated[float, Meta(ge=0, lt=1, title="a share")] | None = setting(
        None,
        "Share of the pool that admission keeps free if the lengths of all requests are estimated, less if "
        "those of some are; guaranteed, timely and provisional add twice the share of tokens computed again, "
        "up to 0.1. Default: 0.01 for these and watermark, 0.025 for reserved, 0.03 for quantile, else 0.",
    )
    step_time: str = setting(
        "",
        "A JSON file of a step-time model, or its parameters (base=0.007,per_kv=4e-8 …). Default: Llama-3-8B "
        "on an H200.",
    )
    replicas: Annotated[int, Meta(ge=1)] = setting(
        1, "Engines behind a router, each with --capacity tokens of its own and the same settings."
    )
    routing: str = setting(
        "prefix",
        "Which replica gets a request: round-robin, each in turn; least-tokens, the one that holds and has "
        "waiting the fewest tokens; prefix, the one whose cache has the most of the prompt in blocks of "
        f"{BLOCK_TOKENS}, unless its load is beyond {BUSY_FACTOR} times the least.",
        choices=tuple(ROUTINGS),
    )
    skip_too_large: bool = setting(False, "Leave out requests that could never fit, instead of stopping.")
    seed: int = setting(0, "Seed of all random numbers: arrivals, a workload's lengths, estimates.")

    def __post_init__(self) -> None:
        """Raises InvalidSimulation."""
        page = page_of(self.allocation)
        require_allowed(self, InvalidSimulation)
        if self.layers and (page != 1 or self.counted in UNIFORM_ADMISSIONS):
            raise InvalidSimulation(
                f"--layers with --allocation {self.allocation} and --admission {self.counted}: pages, runs and "
                f"the admissions {' and '.join(UNIFORM_ADMISSIONS)} count tokens that all layers hold for as "
                "long as a request runs; leave --layers out"
            )
        if self.states and page != 1:
            raise InvalidSimulation(
                f"--states with --allocation {self.allocation}, which is for models without; leave --states out"
            )
        groups_of(self.layers)
        if not page and self.admission not in (None, "sum"):
            raise InvalidSimulation(
                f"--admission is {self.admission!r}; a contiguous allocation reserves the prompt and --max-new "
                "at once, which is sum: leave --admission out"
            )
        if self.load is not None and self.rate is not None:
            raise InvalidSimulation("--load and --rate both set the arrival rate; give one")

    @property
    def reading(self) -> Reading:
        """How the numbers of a trace's file are read."""
        return Reading(self.time_unit, self.block_tokens)

    @property
    def num_slots(self) -> int:
        """Slots of a pool that has the bytes of `capacity` tokens in all layers."""
        groups = groups_of(self.layers)
        return self.capacity * sum(map(len, groups.groups)) // groups.num_lanes

    @property
    def counted(self) -> str:
        """The name of the admission, or of its default."""
        return self.admission or ("guaranteed" if page_of(self.allocation) else "sum")


def groups_of(layers: str) -> LayerGroups:
    """Returns how layers share slots, from the words of --layers; "": all see everything. Raises
    InvalidSimulation."""
    if not layers:
        return ONE_GROUP
    lifetimes: list[Lifetime] = []
    for words in layers.split(","):
        found = LAYERS.fullmatch(words.strip())
        if found is None:
            raise InvalidSimulation(
                f"--layers is {layers!r}, of which {words!r} is no number of layers and what they see; give "
                "8xfull,40xwindow:1024, say, or chunk for window"
            )
        num, sees, size = found.groups()
        one = FULL if sees is None else Lifetime("window" if sees == "window" else "chunk", int(size))
        lifetimes += [one] * int(num)
    return LayerGroups.of(lifetimes)


def page_of(allocation: str) -> int:
    """Returns the page size of an allocation: 1 for token, 0 for contiguous. Raises InvalidSimulation."""
    if allocation in ("token", "contiguous"):
        return int(allocation == "token")
    name, _, size = allocation.partition(":")
    if name != "paged" or not (size.isascii() and size.isdigit()) or len(size) > 9 or int(size) < 2:
        raise InvalidSimulation(
            f"--allocation is {allocation!r}; give token, contiguous, or paged:N (pages of N tokens, N > 1)"
        )
    return int(size)
