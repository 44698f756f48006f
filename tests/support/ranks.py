"""Runs a function in several processes at once, each of which is a rank of one group on the CPU."""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightkv.integrations.ranks.group import RankGroup

LIMIT = 240.0  # seconds for all ranks, on a busy machine


def _rank(number: int, size: int, store: Path, answers: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    ranks = RankGroup(number, size, dist.FileStore(str(store), size), torch.device("cpu"))
    try:
        answers.put((number, function(ranks, *args), None))
    except Exception as error:
        answers.put((number, None, f"{type(error).__name__}: {error}"))
        raise
    ranks.leave()


def run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns what `function(ranks, *args)` returns on each of `size` ranks. It stands in a module, and what it
    gets and returns is plain data. Raises AssertionError with the first error of a rank."""
    context = multiprocessing.get_context("forkserver")
    # Imported once, and not by each rank: what all ranks need, and the module of the first function.
    context.set_forkserver_preload([__name__, "lightkv.router.model.build", function.__module__])
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        ranks = [
            context.Process(target=_rank, args=(number, size, store, answers, function, args), daemon=True)
            for number in range(size)
        ]
        for process in ranks:
            process.start()
        try:
            found = {}
            for _ in ranks:
                number, result, error = answers.get(timeout=LIMIT)
                assert error is None, f"rank {number}: {error}"
                found[number] = result
            for process in ranks:
                process.join(LIMIT)
            return [found[number] for number in range(size)]
        finally:
            for process in ranks:
                process.kill()
                process.join()
