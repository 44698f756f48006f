"""Compares `combine_partials` with its reference, on plans of every form; parts of no request are NaN."""

import random

import torch

from lightkv.triton_kernels.attention.decode.decode_combine import combine_partials, combine_parts_reference
from lightkv.triton_kernels.attention.decode.decode_plan import DecodePlan
from tests.support.combinations import each_pair

NUM_HEADS, VALUE_DIM = 3, 80


def random_plan(rng: random.Random, num_members: int, device: torch.device) -> DecodePlan:
    """Makes a plan in which some requests have parts of a shared prefix as well as their own."""
    num_workers, num_prefixes, own_parts = 5, 2, (2 + 5) * num_members if num_members > 1 else 0
    parts, first_item = [], num_prefixes
    for request in range(rng.choice([1, 2, 9])):
        count = rng.choice([1, 1, 2, 3, 65])  # 65 is one more than a tile of parts, of any size
        of_prefix = rng.choice([0, 1, 2]) if num_members > 1 else 0
        first_of_prefix = request % num_members if of_prefix else 0
        parts.append([own_parts + first_item, count, first_of_prefix, of_prefix])
        first_item += count
    split = [request for request, (_, count, _, more) in enumerate(parts) if count + more > 1]
    split += [-1] * (len(parts) + 1 - len(split))
    items = torch.zeros(first_item, 4, dtype=torch.int32)
    members = torch.zeros(num_prefixes, num_members, dtype=torch.int32) if num_members > 1 else None
    numbers = items, torch.zeros(num_workers + 1, 8), torch.tensor(parts), torch.tensor(split)
    plan = DecodePlan(*(tensor.int().to(device) for tensor in numbers), members)
    assert plan.own_parts == own_parts
    return plan


@each_pair(num_members=[1, 4], num_queries=[1, 2], seed=range(5))
def test_parts_are_combined(device: torch.device, seed: int, num_queries: int, num_members: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plan = random_plan(rng, num_members, device)
    shape = plan.num_parts, num_queries * NUM_HEADS
    partial_out = torch.full((*shape, VALUE_DIM), torch.nan, device=device)
    partial_lse = torch.full(shape, torch.nan, device=device)
    for first, count, of_prefix, num in plan.parts.tolist():
        chosen = [*range(first, first + count), *(of_prefix + part * num_members for part in range(num))]
        partial_out[chosen] = torch.randn(len(chosen), *partial_out.shape[1:], device=device)
        partial_lse[chosen] = torch.randn(len(chosen), shape[1], device=device) * 20
        unseen = chosen[1:][:1]  # a part whose queries saw no key
        partial_out[unseen], partial_lse[unseen] = 0.0, -torch.inf
    out = torch.full((len(plan.parts) * num_queries, NUM_HEADS, VALUE_DIM), torch.nan, device=device)
    lse = torch.full(out.shape[:2], torch.nan, device=device)
    combine_partials(partial_out, partial_lse, plan, out, lse, num_queries)
    combined = combine_parts_reference(partial_out, partial_lse, plan, num_queries)
    for request in range(len(plan.parts)):
        queries = slice(request * num_queries, (request + 1) * num_queries)
        if request in combined:
            expected_out, expected_lse = combined[request]
            torch.testing.assert_close(out[queries], expected_out, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[queries], expected_lse, atol=1e-4, rtol=1e-5)
        else:
            assert out[queries].isnan().all()
            assert lse[queries].isnan().all()
