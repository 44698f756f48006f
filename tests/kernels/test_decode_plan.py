"""Compares `decode_plan` with its reference, and checks that every key is in one item of one worker."""

import random
from itertools import pairwise

import pytest
import torch

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_plan import (
    DecodePlan,
    SharedPrefixGroups,
    decode_plan,
)
from lightkv.triton_kernels.attention.decode.decode_tuning import decode_programs, decode_workers
from lightkv.triton_kernels.attention.paged_kv import HeadShape
from lightkv.triton_kernels.attention.variants import Chunk, Window
from tests.support.attention.plans import decode_plan_reference
from tests.support.combinations import slow

UNIT = decode_tuning.DECODE_UNIT
HEADS = HeadShape(1, 1, 128, 128)


def assert_complete(plan: DecodePlan, runs: list[list[int]], num_prefixes: int) -> None:
    """Checks that the keys of every run (owner, row, first key, end) are cut into consecutive items, that every
    item belongs to one worker, and that `parts` and `split` agree with the items."""
    items, starts = plan.items.tolist(), plan.shares[:, 0].tolist()
    at, found = 0, []
    for owner, row, first, last in runs:
        begin = at
        while at < starts[-1] and items[at][0] == owner:
            assert items[at][:3] == [owner, row, first]
            first = items[at][3]
            at += 1
        assert first == last
        assert at - begin >= (owner >= 0 or last > 0)
        assert at - begin == 1 or all(item[2] < item[3] for item in items[begin:at])
        found.append((begin, at - begin))
    assert starts[-1] == at
    assert starts == sorted(starts)
    assert starts[0] == 0
    for begin, end, fields in zip(starts, starts[1:], plan.shares[:, 1:5].tolist(), strict=False):
        assert begin == end or fields == items[begin]
    own = [[plan.own_parts + begin, count] for begin, count in found[num_prefixes:]]
    assert plan.parts[:, :2].tolist() == own
    several = [request for request, (_, count, _, more) in enumerate(plan.parts.tolist()) if count + more > 1]
    assert [request for request in plan.split.tolist() if request >= 0] == several


def assert_equal(plan: DecodePlan, expected: DecodePlan) -> None:
    used = len(expected.items)
    assert used <= len(plan.items)
    assert torch.equal(plan.items[:used], expected.items)
    assert torch.equal(plan.shares[:, 0], expected.shares[:, 0])
    assert torch.equal(plan.parts, expected.parts)
    assert torch.equal(plan.split, expected.split)


@pytest.mark.parametrize("seed", [*range(12), *slow(*range(12, 30))])
def test_any_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    num_workers, window = rng.choice([1, 2, 5, 16, 70]), rng.choice([0, 0, 40, 500])
    chunk, num_queries = rng.choice([0, 48, 1000]) if not window else 0, rng.choice([1, 3])
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_workers)
    lengths = [rng.choice([0, 1, UNIT, UNIT + 1, rng.randint(0, 3000)]) for _ in range(rng.randint(1, 40))]
    rows = rng.sample(range(100), len(lengths))
    on_device = (
        torch.tensor(rows, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    limits = (Window(window),) if window else (Chunk(chunk),) if chunk else ()
    mask = {"limits": limits, "num_queries": num_queries}
    plan = decode_plan(*on_device, HEADS, dtype=torch.float16, **mask)
    expected = decode_plan_reference(*on_device, num_workers=num_workers, unit=UNIT, **mask)
    assert_equal(plan, expected)
    assert plan.own_parts == expected.own_parts == 0
    positions = [max(length - num_queries, 0) for length in lengths]  # of the first queries
    firsts = [max(position - window + 1, 0) if window else 0 for position in positions]
    if chunk:
        firsts = [position - position % chunk for position in positions]
    runs = [list(run) for run in zip(range(len(rows)), rows, firsts, lengths, strict=True)]
    assert_complete(plan, runs, 0)
    assert_complete(expected, runs, 0)


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 20))])
def test_any_prefixes(device: torch.device, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    num_workers, num_members = rng.choice([1, 2, 7, 40]), rng.choice([2, 3, 16])
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_workers)
    num_prefixes, num_requests = rng.randint(1, 5), rng.randint(1, 30)
    members = [[-1] * num_members for _ in range(num_prefixes)]
    keys, place, lengths = [0] * num_prefixes, [-1] * num_requests, []
    for request in range(num_requests):
        prefix = rng.randrange(num_prefixes + 1)
        length = rng.choice([0, 1, UNIT, rng.randint(0, 2000)])
        if prefix < num_prefixes and -1 in members[prefix]:
            member = members[prefix].index(-1)
            members[prefix][member], place[request] = request, prefix * num_members + member
            keys[prefix] = keys[prefix] or rng.choice([1, UNIT, rng.randint(1, 1500)])
            length += keys[prefix] + 1
        lengths.append(length)
    rows = rng.sample(range(100), num_requests)
    on_device = (
        torch.tensor(rows, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    prefixes = SharedPrefixGroups(
        *(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (members, keys, place))
    )
    chunk = rng.choice([0, 0, 100, 1500])
    settings = {"limits": (Chunk(chunk),) if chunk else (), "shared_prefixes": prefixes}
    plan = decode_plan(*on_device, HEADS, dtype=torch.float16, **settings)
    expected = decode_plan_reference(*on_device, num_workers=num_workers, unit=UNIT, **settings)
    assert_equal(plan, expected)
    assert plan.own_parts == expected.own_parts
    chunks = [max(length - 1, 0) // chunk * chunk if chunk else 0 for length in lengths]
    runs = []
    for prefix, count in enumerate(keys):
        first = min([count, *(chunks[member] for member in members[prefix] if member >= 0)])
        if first < count:
            runs.append([-1 - prefix, rows[members[prefix][0]], first, count])
    num_used = len(runs)
    for request, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        shared = keys[place[request] // num_members] if place[request] >= 0 else 0
        runs.append([request, row, max(shared, chunks[request]), length])
    assert_complete(plan, runs, num_used)

    # No two requests have the same part, and every part exists.
    taken = [part for first, count, *_ in plan.parts.tolist() for part in range(first, first + count)]
    for *_, first, count in plan.parts.tolist():
        taken += [first + rank * num_members for rank in range(count)]
    assert len(set(taken)) == len(taken)
    assert max(taken) < plan.num_parts


def test_workers_have_equal_shares(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: 10)
    lengths = torch.tensor([40 * UNIT, 1, 7 * UNIT, 300 * UNIT, UNIT], dtype=torch.int32, device=device)
    plan = decode_plan(torch.arange(5, device=device), lengths, HEADS, dtype=torch.float16)
    keys = (plan.items[:, 3] - plan.items[:, 2]).tolist()
    starts = plan.shares[:, 0].tolist()
    shares = [sum(keys[begin:end]) for begin, end in pairwise(starts)]
    assert max(shares) <= 35 * UNIT  # 349 units for 10
    assert sum(shares) == int(lengths.sum())
    assert sum(share > 33 * UNIT for share in shares) >= 9


def test_no_request_is_no_plan(device: torch.device) -> None:
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    plan = decode_plan(empty, empty, HeadShape(4, 4, 128, 128), dtype=torch.float16)
    assert (len(plan.parts), len(plan.split)) == (0, 0)


def test_refuses_prefixes_that_do_not_fit(device: torch.device) -> None:
    rows = torch.arange(3, dtype=torch.int32, device=device)
    prefixes = SharedPrefixGroups(rows.view(1, 3), rows[:1], rows)
    with pytest.raises(ValueError, match="without a window"):
        decode_plan(
            rows,
            rows + 5,
            HEADS,
            dtype=torch.float16,
            limits=(Window(4),),
            shared_prefixes=prefixes,
        )
    with pytest.raises(ValueError, match=r"place must be contiguous int32 \[B\], with B 2"):
        decode_plan(rows[:2], rows[:2] + 5, HEADS, dtype=torch.float16, shared_prefixes=prefixes)
    for match, wrong in [
        (r"keys must be contiguous int32 \[P\], with P 1", prefixes._replace(keys=rows)),
        ("contiguous int32", prefixes._replace(place=rows.long())),
    ]:
        with pytest.raises(ValueError, match=match):
            decode_plan(rows, rows + 5, HEADS, dtype=torch.float16, shared_prefixes=wrong)
    with pytest.raises(ValueError, match="lengths must be contiguous int32"):
        decode_plan(rows, rows.long(), HEADS, dtype=torch.float16)


def test_prefixes_of_one_member_are_ignored(device: torch.device) -> None:
    rows = torch.arange(3, dtype=torch.int32, device=device)
    alone = SharedPrefixGroups(rows.view(3, 1), rows + 1, rows)
    plan = decode_plan(rows, rows + 5, HEADS, dtype=torch.float16, shared_prefixes=alone)
    assert plan.members is None
    assert plan.own_parts == 0


@pytest.mark.parametrize("shared_memory", [64 * 1024, 99 * 1024, 227 * 1024], ids="{}".format)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256], ids="dim{}".format)
def test_launches_fit_the_shared_memory(shared_memory: int, head_dim: int) -> None:
    device = tuning.DeviceClass(40, shared_memory, 8)
    for num_rows in (1, 4, 16, 64, 128):
        for several in (False, True):
            launch = decode_tuning.decode_launch(device, num_rows, several, head_dim, head_dim, 2)
            assert launch.block_m >= num_rows
            dim = tuning.padded_dim(head_dim)
            if launch.block_m <= 64:
                tiles = launch.block_m + 2 * launch.num_stages * launch.block_n
                assert 2 * dim * tiles <= shared_memory


def test_as_many_programs_as_run_at_once() -> None:
    """A program has three stages of 32 keys, or of 64 short ones, in shared memory."""
    device = tuning.DeviceClass(132, 227 * 1024, 9)
    for dims, key_bytes, programs in (
        (64, 256, 4),
        (128, 512, 4),
        (160, 640, 3),
        (256, 1024, 2),
        (1024, 4096, 1),
    ):
        assert decode_workers(device, decode_programs(1, key_bytes), 8) == programs * 132 // 8
        assert decode_workers(device, decode_programs(8, key_bytes), 8) == min(programs, 2) * 132 // 8
        if dims <= 256:
            launch = decode_tuning.decode_launch(device, 8, False, dims, dims, 2)
            padded = 2 * 2 * tuning.padded_dim(dims)
            if dims in (64, 128, 256):
                assert programs * launch.num_stages * launch.block_n * padded <= device.shared_memory
