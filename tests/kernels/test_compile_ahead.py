"""Kernels are compiled ahead, and not launched, for a GPU that is not there.

They are compiled in another process, because this one interprets kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = '''
import json, threading
from typing import Any, NamedTuple
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class H200:
    """Only compiles: a launch would need what this driver lacks."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


driver.set_active(H200())
from lightkv.triton_kernels.compile_ahead import compile_ahead
from lightkv.triton_kernels.slots.relaunch import Launches


@triton.jit
def add(x, n, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    place = tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < n)
    if BIAS is not None:
        value += BIAS
    tl.store(x + place, value, mask=place < n)


class Inner(NamedTuple):
    bias: Any
    block: tl.constexpr


class Record(NamedTuple):
    x: Any
    inner: Inner


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def add_record(record, CHANGE: tl.constexpr):
    place = record.x + tl.arange(0, record.inner.block)
    value = tl.load(place)
    if record.inner.bias is not None:
        value += record.inner.bias
    tl.store(place, CHANGE(value))


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), undefined)


compiled, launches = [], Launches()
triton.knobs.compilation.listener = lambda **event: compiled.append(event["src"].name)
before = triton.JITFunction.run, triton.JITFunction._do_compile
x = torch.zeros(64)
with compile_ahead(torch.device("cpu")):
    for block in (32, 64, 32, 64):
        for bias in (None, 2):
            add[(1,)](x, 5, BLOCK=block, BIAS=bias)
    add[(1,)](torch.zeros(64, dtype=torch.int32), 5, BLOCK=32, BIAS=None)
    for bias in (None, 2):
        add_record[(1,)](Record(x, Inner(bias, tl.constexpr(64))), CHANGE=twice)
    broken[(1,)](x, BLOCK=32)
ahead = sorted(compiled)
add.warmup(x, 7, BLOCK=64, BIAS=2, grid=(1,))  # compiled already
add_record.warmup(Record(x, Inner(2, tl.constexpr(64))), CHANGE=twice, grid=(1,))
known = len(compiled) == len(ahead)
try:
    broken.warmup(x, BLOCK=32, grid=(1,))
    error = ""
except Exception as raised:
    error = type(raised).__name__
with compile_ahead(torch.device("cpu")):
    for _ in range(3):  # not launched, either
        add[(1,)](x, 5, BLOCK=64, BIAS=2)
        launches.launch(add, "add", 1, (x, 5), lambda: {"BLOCK": 64, "BIAS": 2})
restored = (triton.JITFunction.run, triton.JITFunction._do_compile) == before
print(json.dumps([ahead, known, error, float(x.sum()), restored, threading.active_count()]))
'''


def test_kernels_are_compiled_once_and_not_launched(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = ["add"] * 5 + ["add_record"] * 2
    assert json.loads(done.stdout.splitlines()[-1]) == [compiled, True, "CompilationError", 0.0, True, 1]
