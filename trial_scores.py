"""Trial: checks and times ALiBi and masks of values in prefill beside plain. Not for main.

PYTHONPATH=. python trial_scores.py
"""

import contextlib
import time

import torch
from triton.experimental.gluon import language as gl

from bench.common.device_clock import DEVICE, CapturedStep, Clock, measure_ceiling
from bench.kernels.attention_features import Requests
from bench.kernels.attention_rows import chunks
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.hopper import prefill_hopper
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention_reference
from lightkv.triton_kernels.attention.variants import Alibi, ValueMask
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes

T0 = time.time()
FEATURES, KNOWS = prefill_hopper.features_of, prefill_hopper.knows_all


def by_multiply_adds(*args):
    features, scale = FEATURES(*args)
    return features._replace(ADDS_COLUMNS=gl.constexpr(False)), scale


@contextlib.contextmanager
def patched(owner, name, value):
    old = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, old)


@contextlib.contextmanager
def two_stages():
    old = prefill_tuning._HOPPER_LAUNCHES[128, 128]
    prefill_tuning._HOPPER_LAUNCHES[128, 128] = old._replace(num_stages=2)
    yield
    prefill_tuning._HOPPER_LAUNCHES[128, 128] = old


def side(requests, options, where=contextlib.nullcontext(), check=False):
    step = requests.prefill(options)
    with where:
        requests.out.fill_(torch.nan)
        step()
        graph = CapturedStep(step)
    if check:
        graph.replay()
        starts = torch.tensor([0, *torch.tensor(requests.batch.q_lens).cumsum(0)], dtype=torch.int32).cuda()
        args = requests.batch.q, requests.kv, requests.rows, starts, requests.lengths
        expected = prefill_attention_reference(*args, options)
        wrong = (requests.out.float() - expected.float()).abs().max().item()
        print(f"  largest error {wrong:.5f}; {time.time() - T0:.0f} s", flush=True)
    return graph


clock = Clock(12)
ceiling, _ = measure_ceiling(clock)
plain = AttentionOptions()
alibi = plain.plus(Alibi(alibi_slopes(32, device=DEVICE)))


def show(name, sides, num_bytes=0):
    times = {one: t._asdict()["median"] for one, t in clock.replay_in_turns(sides).items()}
    first = next(iter(times.values()))
    bound = first + num_bytes / ceiling.bytes_per_us
    print(name, ", ".join(f"{one} {t:.1f} ({t / bound:.3f})" for one, t in times.items()), flush=True)


for name, row in (
    ("4 × 4k", chunks("", [4096] * 4, [0] * 4)),
    ("2k after 30k", chunks("", [2048], [30720])),
    ("8 × 512 after 4k", chunks("", [512] * 8, [4096] * 8)),
):
    r = Requests(row)
    sides = {
        "plain": side(r, plain),
        "plain, 2 stages": side(r, plain, two_stages()),
        "ALiBi by products": side(r, alibi, check=name == "8 × 512 after 4k"),
        "ALiBi by multiply-adds": side(r, alibi, patched(prefill_hopper, "features_of", by_multiply_adds)),
    }
    show("ALiBi, " + name, sides)
r = Requests(chunks("", [2048], [2048]))
for dtype in (torch.bfloat16, torch.float32, torch.bool):
    if dtype == torch.bool:
        values = torch.rand(2048, 4096, device=DEVICE) < 0.9
    else:
        values = torch.randn(32, 2048, 4096, device=DEVICE).to(dtype)
    masked = plain.plus(ValueMask(values))
    sides = {"plain": side(r, plain), "Hopper's": side(r, masked, check=True)}
    if dtype == torch.bfloat16:
        general = patched(prefill_hopper, "knows_all", lambda variants, *dims: not variants)
        sides["general"] = side(r, masked, general)
    show(f"values {dtype}", sides, values.nbytes)
print(f"{time.time() - T0:.0f} s")
