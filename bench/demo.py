"""`make demo`: eight chats at once on one model, and the counts of the KV cache.

Sampling is greedy, so that the answers are the same every time. At the end the demo recounts the memory, and
fails if tokens are still held or a count is wrong.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightkv.errors import LightKVError
from lightkv.router.config import EngineConfig
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.terminal import progress

if TYPE_CHECKING:
    from lightkv.router.engine.loop import EngineStats
    from lightkv.router.llm import LLM

SYSTEM = """You are the guide of the lighthouse at Skerry Point. Answer visitors in one short sentence, \
using only these notes.

Building. The lighthouse at Skerry Point was built in 1868 by the engineer Margaret Hale, after the ship \
Northern Star was lost on the rocks below with all of her cargo of wool. It took four years to build. The \
tower is 41 metres high, is made of grey granite from the island of Arran, and has 212 steps from the door to \
the lantern room. The door is painted red, so that the keepers could find it in a snowstorm.

Light. The first lamp burned whale oil; since 1931 the lamp is electric. It flashes twice every 15 seconds \
and can be seen from 22 miles away. The lens weighs 3 tonnes, was ground in Paris, and turns in a bath of \
mercury so smoothly that a child can push it with one finger.

Keepers. Three keepers lived here at a time, six weeks on and two weeks off. The last keeper was Thomas Reid, \
who left in 1994 when the light became automatic. He kept a grey cat named Pepper, who caught puffins and was \
forgiven. The keepers grew potatoes and cabbages in a walled garden, which still stands.

Animals. Puffins nest on the cliffs from April to August, and grey seals rest on the western rocks all year. \
In September whales pass close by, on their way south.

Visits. The lighthouse is open from Tuesday to Sunday, from 10 in the morning to 4 in the afternoon. A \
ticket costs 8 pounds, and children under 12 enter free. The ferry leaves the village of Dunmore every hour. \
The tea room sells scones with blackberry jam. Dogs are welcome in the garden but not in the tower."""

QUESTIONS = (
    "Who was the last keeper?",
    "What was the name of the last keeper's cat?",
    "From how far away can the light be seen?",
    "When is the lighthouse open?",
    "What did the keepers grow?",
    "What does the tea room sell?",
    "Where does the ferry leave from?",
    "How many steps are there?",
)
SENTENCE_ENDS = (". ", ".\n")  # stop after a sentence: a model this small knows the fact, then makes up more


@dataclass
class _Chat:
    """One conversation on the screen."""

    question: str
    text: str = ""


@dataclass(frozen=True)
class Run:
    """The figures of one run. `forecast_peak`: the most tokens that the forecast of any step expected."""

    num_tokens: int
    seconds: float
    seconds_to_first: float
    forecast_peak: int


def main() -> int:
    """Loads the default model, answers the questions and prints the figures. Returns the exit code."""
    console = Console(highlight=False)
    try:
        with progress(console, "importing torch") as report:
            from lightkv.router.llm import LLM

            llm = LLM(EngineConfig(), report)
        run = answer(llm, console)
        llm.check()
    except LightKVError as error:
        Console(stderr=True).print(f"demo: {error}", markup=False, soft_wrap=True)
        return 1
    stats = llm.stats()
    for name, value in summary(stats, run, llm.info.pool_bytes).items():
        console.print(f"{name:<20}{value}", markup=False, soft_wrap=True)
    wrong = faults(stats, run)
    for fault in wrong:
        console.print(f"demo: {fault}", markup=False, soft_wrap=True)
    if not wrong:
        console.print("all counts are checked: no tokens are held, and free + cached = capacity")
    return 1 if wrong else 0


def answer(llm: "LLM", console: Console, max_tokens: int = 48) -> Run:
    """Asks all questions at once. Shows the answers while they grow, or without a terminal when they end."""
    chats = [_Chat(question) for question in QUESTIONS]
    prompts = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": chat.question}] for chat in chats
    ]
    is_live = console.is_terminal and not console.is_dumb_terminal
    live = Live(console=console, refresh_per_second=12) if is_live else None
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, stop=SENTENCE_ENDS, include_stop_str_in_output=True
    )
    num_tokens = forecast_peak = 0
    seconds_to_first = 0.0
    started = time.perf_counter()
    with live or nullcontext():
        for chunk in llm.stream(prompts, params):
            seconds_to_first = seconds_to_first or time.perf_counter() - started
            forecast_peak = max(forecast_peak, llm.stats().forecast_peak)
            num_tokens += len(chunk.token_ids)
            chat = chats[chunk.prompt_idx]
            chat.text += chunk.text
            if live is not None:
                live.update(_table(chats))
            elif chunk.finish_reason is not None:
                console.print(f"{chat.question}\n    {chat.text.strip()}", markup=False, soft_wrap=True)
    seconds = time.perf_counter() - started
    console.print()
    return Run(num_tokens, seconds, seconds_to_first, forecast_peak)


def summary(stats: "EngineStats", run: Run, pool_bytes: int) -> dict[str, str]:
    """Returns the counts of the memory and the speed, by name."""
    share = stats.hit_tokens / max(stats.prompt_tokens, 1)
    return {
        "capacity": f"{stats.capacity:,} tokens ({pool_bytes / 2**20:,.1f} MiB)",
        "held": f"{stats.held:,} tokens",
        "cached": f"{stats.cached:,} tokens",
        "free": f"{stats.free:,} tokens",
        "prefix tokens hit": f"{stats.hit_tokens:,} of {stats.prompt_tokens:,} prompt tokens ({share:.0%})",
        "forecast peak": f"{run.forecast_peak:,} tokens, if every answer reached its maximum length",
        "reached peak": f"{stats.reached_peak:,} tokens",
        "speed": f"{run.num_tokens / run.seconds:.1f} tokens/s: {run.num_tokens:,} in {run.seconds:.1f} s",
        "steps": f"{stats.num_steps:,}",
        "time to first token": f"{run.seconds_to_first:.2f} s",
    }


def faults(stats: "EngineStats", run: Run) -> list[str]:
    """Returns what is wrong with the counts after all answers have ended; empty if nothing is."""
    found = []
    if stats.held:
        found.append(f"{stats.held} tokens are still held, although no request is left")
    if stats.free + stats.cached != stats.capacity:
        found.append(f"{stats.free} free + {stats.cached} cached is not the capacity of {stats.capacity}")
    if not stats.reached_peak <= run.forecast_peak <= stats.capacity:
        found.append(
            f"the peaks are out of order: {stats.reached_peak} reached, {run.forecast_peak} forecast, "
            f"{stats.capacity} in the pool"
        )
    return found


def _table(chats: list[_Chat]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=2)
    table.add_column(ratio=3)
    for chat in chats:
        table.add_row(Text(chat.question, style="bold"), Text(chat.text.strip()))
    return table


if __name__ == "__main__":
    sys.exit(main())
