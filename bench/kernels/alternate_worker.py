"""Times rows in one tree, for `alternate.py`, which runs this file in a process of each tree.

The file is the new tree's, also where it runs in the old one. Everything that it imports from lightkv and from
bench is of the tree that comes first in PYTHONPATH. It reads requests from stdin, a line of JSON each, and
answers each by a line of JSON; what else is printed goes to stderr.
"""

import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton import JITFunction

SETTLE = 60  # replays before the first that is timed: the first ones after large tensors are made are slower
REPLAYS = 10  # timed in a turn

Measure = Callable[[], list[float]]  # runs once, and returns times in µs


def load(path: Path) -> Any:
    """Imports a file of the new tree, which the tree in PYTHONPATH may not have, or in another form."""
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def launch_nothing() -> None:
    """Makes launches do nothing but check their arguments' names, so that rows can be tried on a CPU."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        own = {name: value for name, value in named.items() if name in kernel.arg_names}
        kernel.signature.bind(*args, **own)

    JITFunction.run = run


class Worker:
    """Answers requests. At most one row is open: its tensors are freed before the next is made."""

    def __init__(self, device: torch.device) -> None:
        from bench.common import device_clock

        self._device = device
        device_clock.DEVICE = device  # before the benches import it
        self._rows: dict[str, Callable[[], dict[str, Any]]] = {}
        for name in ("alternate_rows", "alternate_models"):
            self._rows |= load(Path(__file__).with_name(f"{name}.py")).rows(device)
        self._open: dict[str, Measure] = {}
        self._clock = device_clock.Clock(REPLAYS) if device.type == "cuda" else None

    def names(self) -> list[str]:
        """Returns the names of all rows; `part: row`."""
        return list(self._rows)

    def compile(self, names: list[str]) -> dict[str, str]:
        """Compiles the kernels of these rows, many at a time. Returns the errors of rows that cannot be made.

        What is missed, say because a row's rest depends on what a kernel computes, is compiled when the row is
        opened."""
        ahead, failed = load(Path(__file__).parents[2] / "triton_kernels" / "compile_ahead.py"), {}
        with torch.inference_mode(), ahead.compile_ahead():
            for name in names:
                try:
                    torch.manual_seed(0)
                    for side in self._rows[name]().values():
                        side()
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}"
                self._free()
        return failed

    def open(self, name: str) -> dict[str, Any]:
        """Makes a row, and runs and captures its sides. Returns what each wrote, as the mean of absolute
        values, and of a model's steps the checksum of the tokens; None if there is neither."""
        self.close()
        torch.manual_seed(0)
        is_timed_by_itself = name.startswith("models:")
        found: dict[str, Any] = {}
        for side, run in self._rows[name]().items():
            if is_timed_by_itself:
                self._open[side], found[side] = run, getattr(run, "checksum", None)
                if self._clock is None:
                    run()
                continue
            out = run()
            found[side] = None
            if self._clock is not None:
                self._open[side] = self._captured(run)
                if isinstance(out, torch.Tensor):
                    found[side] = float(out.double().abs().mean())
        return found

    def _captured(self, run: Callable[[], Any]) -> Measure:
        from bench.common.device_clock import CapturedStep

        clock = self._clock
        assert clock is not None
        graph = CapturedStep(run)
        for _ in range(SETTLE):
            graph.replay()
        torch.cuda.synchronize()
        return lambda: [clock.replay(graph).median]

    def time(self, side: str) -> list[float]:
        """Returns times of a side of the open row, in µs."""
        return self._open[side]()

    def close(self) -> None:
        """Frees the open row."""
        self._open.clear()
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tree = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]).resolve()
    device = torch.device(sys.argv[1])
    import lightkv

    if device.type == "cpu":
        launch_nothing()
    if tree not in Path(lightkv.__file__).resolve().parents:
        sys.exit(f"lightkv is that of {lightkv.__file__}, not of {tree}")
    worker = Worker(device)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        begin = time.perf_counter()
        try:
            answer = {"answer": getattr(worker, verb)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        print(json.dumps(answer | {"seconds": time.perf_counter() - begin}), file=answers, flush=True)


if __name__ == "__main__":
    main()
