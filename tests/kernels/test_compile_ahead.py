"""Kernels are compiled ahead, and not launched, for a GPU that is not there.

They are compiled in another process, because this one interprets kernels.
"""

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


class Record(NamedTuple):
    """As kernels of attention take them: pointers, None, constants and functions."""

    bias: Any
    nothing: Any
    BLOCK: Any
    CHANGE: Any


@triton.jit
def twice(value):
    return 2 * value


@triton.jit
def records(x, record, n):
    place = tl.arange(0, record.BLOCK)
    value = record.CHANGE(tl.load(x + place, mask=place < n))
    if record.nothing is None:
        value += tl.load(record.bias + place)
    tl.store(x + place, value, mask=place < n)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), undefined)


compiled, launches = [], Launches()
triton.knobs.compilation.listener = lambda **event: compiled.append(event["src"].name)
before = triton.JITFunction.run
x = torch.zeros(64)
record = Record(torch.zeros(64), None, tl.constexpr(64), tl.constexpr(twice))
with compile_ahead():
    for block in (32, 64, 32, 64):
        for bias in (None, 2):
            add[(1,)](x, 5, BLOCK=block, BIAS=bias)
    add[(1,)](torch.zeros(64, dtype=torch.int32), 5, BLOCK=32, BIAS=None)
    records[(1,)](x, record, 5)
    broken[(1,)](x, BLOCK=32)
ahead = sorted(compiled)
add.warmup(x, 7, BLOCK=64, BIAS=2, grid=(1,))  # compiled already
records.run(x, record, 7, grid=(1,), warmup=True)
known = len(compiled) == len(ahead)
try:
    broken[(1,)](x, BLOCK=32)
    error = ""
except Exception as raised:
    error = type(raised).__name__
with compile_ahead():
    for _ in range(3):  # not launched, either
        add[(1,)](x, 5, BLOCK=64, BIAS=2)
        launches.launch(add, "add", 1, (x, 5), lambda: {"BLOCK": 64, "BIAS": 2})
restored = triton.JITFunction.run is before and triton.knobs.runtime.jit_cache_hook is None
print(json.dumps([ahead, known, error, float(x.sum()), restored, threading.active_count()]))

from lightkv.router.service.worker import _announce_compilation

announced = []
for _ in range(2):  # the second changes nothing
    _announce_compilation(announced.append)
add.warmup(x, 7, BLOCK=64, BIAS=2, grid=(1,))  # known already
add.warmup(x, 7, BLOCK=128, BIAS=2, grid=(1,))
records.run(x, record._replace(BLOCK=tl.constexpr(128)), 7, grid=(1,), warmup=True)
print(json.dumps(announced))
'''


def test_kernels_are_compiled_once_and_not_launched(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = '[["add", "add", "add", "add", "add", "records"], true, "CompilationError", 0.0, true, 1]'
    assert done.stdout.splitlines() == [expected, '["compiling add", "compiling records"]']
