"""Compares both backends, in steps with a mask, with attention of each sequence in float64."""

import pytest
import torch

from lightkv.attention import (
    AttentionOptions,
    Batch,
    LayerShape,
    Rotary,
    Step,
    make_backends,
)
from lightkv.attention.forms.gaps import with_gaps
from lightkv.attention.forms.rings import over_rings
from lightkv.triton_kernels.attention.attention_reference import attend_reference, attend_request
from lightkv.triton_kernels.attention.variants import SinkLogits, TreeMask, ValueMask, Window
from lightkv.triton_kernels.attention.variants.variant import Scored
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.attention.histories import History

ROWS, COUNTS = [1, 4, 3, 2], [7, 3, 1, 1]  # two prefills, two decodes


def masks(num_tokens: int, width: int, device: torch.device) -> dict[str, ValueMask | TreeMask]:
    shown = torch.rand(num_tokens, width) < 0.7
    shown[1] = False  # a query that sees nothing
    values = torch.randn(4, num_tokens, width).masked_fill(~shown, -torch.inf)
    bits = torch.randint(0, 2**20, (num_tokens, 1)) | (1 << torch.arange(num_tokens)[:, None])
    return {
        "bool": ValueMask(shown.to(device)),
        "each head": ValueMask(values.to(device)),
        "tree": TreeMask(bits.to(device)),
    }


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["bool", "each head", "tree"])
def test_a_step_with_a_mask(kind: str, name: str, device: torch.device) -> None:
    torch.manual_seed(1)
    history = History(LayerShape(4, 16, 2), torch.float32, device)
    (backend,) = make_backends(name, device, [history.shape])
    history.memory.pool.kv(0)[1:] = torch.nan
    for at, (rows, counts, num_prefills) in enumerate([(ROWS, [5, 2, 9, 3], 4), (ROWS, COUNTS, 2)]):
        total, starts = sum(counts), history.place(rows, counts)
        mask = masks(total, 20, device)[kind] if at else None
        step = Step.of(Batch.of(rows, starts, counts, num_prefills), history.memory, mask=mask)
        q, k, v = (torch.randn(total, heads, 16, device=device) for heads in (4, 2, 2))
        history.append(rows, counts, k, v)
        out = backend.forward(q, k, v, step).unflatten(1, (4, 16))
        begin = 0
        for request, (row, count) in enumerate(zip(rows, counts, strict=True)):
            queries, length = slice(begin, begin + count), history.length(row)
            options = history.shape.options.plus(mask)
            scored = Scored.of_last(queries, request, length, device)
            expected = attend_reference(q[queries], history.k[row], history.v[row], options, scored)
            torch.testing.assert_close(out[queries].double(), expected, atol=2e-5, rtol=2e-5)
            begin += count


@pytest.mark.parametrize("hidden", [-1e9, -1e20])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_a_query_whose_keys_all_have_a_huge_negative_value(
    hidden: float, has_sinks: bool, device: torch.device
) -> None:
    """The weights sum to 1, as in any softmax, and to 0 beside learned sinks."""
    torch.manual_seed(2)
    q = torch.randn(2, 4, 16, device=device)
    k, v = torch.randn(2, 9, 2, 16, device=device)
    values = torch.zeros(2, 9, device=device)
    values[0] = hidden
    sinks = SinkLogits(torch.zeros(4, device=device)) if has_sinks else None
    options = AttentionOptions().plus(ValueMask(values), sinks)
    scored = Scored.of_last(slice(0, 2), 0, 9, device)
    found = attend_request(q, k, v, options, scored)
    expected = attend_reference(q, k, v, options, scored)
    mean = v[:8].mean(0).repeat_interleave(2, 0)  # the last key is after this query
    torch.testing.assert_close(found[0], torch.zeros_like(mean) if has_sinks else mean)
    torch.testing.assert_close(found[1].double(), expected[1], atol=1e-5, rtol=1e-5)
    if hidden == -1e20:  # float64 tells keys apart beside -1e9
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_sink_tokens_and_masks_are_refused_together(device: torch.device) -> None:
    history = History(LayerShape(4, 16, 2), torch.float32, device)
    rotary = Rotary(torch.ones(8, device=device))
    mask = ValueMask(torch.ones(1, 9, dtype=torch.bool, device=device))
    step = Step.of(Batch.of([1], history.place([1], [5]), [5], 1), history.memory)
    history.append([1], [5], *(torch.zeros(5, 2, 16, device=device) for _ in range(2)))
    starts = history.place([1], [1])
    decode, prompt = Batch.of([1], starts, [1], 0), Batch.of([1], starts, [1], 1)
    for rings in (over_rings(decode, Ring(0, 8)), over_rings(prompt, Ring(0, 8))):
        with pytest.raises(ValueError, match="a mask in a step over Ring"):
            Step.of(rings, history.memory, mask=mask)
    with pytest.raises(ValueError, match="its columns are positions"):
        Step.of(with_gaps(decode, [3]), history.memory, mask=mask)
    tree = TreeMask(torch.ones(1, 1, dtype=torch.int32, device=device))
    Step.of(with_gaps(decode, [3]), history.memory, mask=tree)
    step = Step.of(over_rings(prompt, Ring(2, 2)), history.memory)
    q = torch.zeros(1, 64, device=device)
    options = AttentionOptions(causal=False)
    (backend,) = make_backends("torch", device, [LayerShape(4, 16, 2, options)], rotary)
    with pytest.raises(ValueError, match="causal False"):
        backend.forward(q, q[:, :32], q[:, :32], step)


def test_a_mask_that_does_not_fit_is_refused(device: torch.device) -> None:
    history = History(LayerShape(4, 16, 2, AttentionOptions().plus(Window(4))), torch.float32, device)
    (backend,) = make_backends("torch", device, [history.shape])
    q, k = torch.zeros(3, 64, device=device), torch.zeros(3, 32, device=device)
    starts = history.place([1], [3])
    for mask, match in [
        (ValueMask(torch.zeros(2, 9, device=device)), "values must be"),
        (TreeMask(torch.zeros(3, 1, dtype=torch.int64, device=device)), "a guess's position is its depth"),
    ]:
        step = Step.of(Batch.of([1], starts, [3], 1), history.memory, mask=mask)
        with pytest.raises(ValueError, match=match):
            backend.forward(q, k, k, step)
