"""Compares both backends, in steps whose rows read positions from other rows, with float64; and the table of
beams that such steps are made from."""

import pytest
import torch

from lightkv.attention import Batch, BatchShape, LayerShape, StaticStep, Step, make_backends
from lightkv.attention.forms.beams import over_beams
from lightkv.attention.forms.gaps import with_gaps
from lightkv.attention.forms.rings import over_rings
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.triton_kernels.attention.lookups.beam_table import beam_indirection
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.attention.histories import CASES, History, on
from tests.support.combinations import each_pair, slow

BEAMS = [4, 1, 3]  # the rows of one request's beams
STEPS = [
    (BEAMS, [6, 6, 6], 3),
    (BEAMS, [1, 1, 1], 0),
    ([4, 1, 3, 2], [3, 2, 1, 1], 2),
    (BEAMS, [1, 1, 1], 0),
]


@each_pair(
    backend_name=["torch", "triton"],
    case=["gqa-3", "sinks-window", *slow(*(name for name in CASES if name not in ("gqa-3", "sinks-window")))],
    static=[False, True],
)
def test_rows_that_read_the_slots_of_other_rows(
    backend_name: str, case: str, static: bool, device: torch.device
) -> None:
    """Each step chooses anew, at random, which beam's K/V each beam has at each earlier position."""
    torch.manual_seed(0)
    history = History(on(CASES[case], device), torch.float32, device)
    shape = history.shape
    backend = make_backends(backend_name, device, [shape])[0]
    graphs = StaticStep(BatchShape.of_decodes(4), history.memory)
    num_rows = len(history.memory.table.req_to_token)
    indirection = torch.zeros(num_rows, 64, dtype=torch.int32, device=device)
    for at, (rows, counts, num_prefills) in enumerate(STEPS):
        starts = history.place(rows, counts)
        indirection.copy_(torch.arange(num_rows, device=device)[:, None])
        if at:
            for row in set(rows) & set(BEAMS):
                first = starts[rows.index(row)]
                known = min(history.length(other) for other in BEAMS)
                chosen = torch.randint(len(BEAMS), (min(first, known),))
                indirection[row, : len(chosen)] = torch.tensor(BEAMS)[chosen].int().to(device)
        batch = over_beams(Batch.of(rows, starts, counts, num_prefills), indirection)
        step = graphs.load(batch) if static and not num_prefills else Step.of(batch, history.memory)
        total = sum(counts)
        q = torch.randn(step.num_tokens, shape.num_heads, shape.head_dim, device=device)
        k = torch.randn(step.num_tokens, shape.num_kv_heads, shape.head_dim, device=device)
        v = torch.randn(step.num_tokens, shape.num_kv_heads, history.v_dim, device=device)
        history.append(rows, counts, k[:total], v[:total])
        out = backend.forward(q, k, v, step)
        own = dict(history.k), dict(history.v)
        expected = []
        for row, part in zip(rows, q[:total].split(counts), strict=True):
            for held, kept in ((history.k, own[0]), (history.v, own[1])):
                read = indirection[row, : len(kept[row])].tolist()
                held[row] = torch.stack([kept[other][at] for at, other in enumerate(read)])
            expected.append(history.attend(row, part))
            history.k, history.v = dict(own[0]), dict(own[1])
        torch.testing.assert_close(out[:total].double(), torch.cat(expected).flatten(1), rtol=2e-5, atol=2e-5)


def test_indirections_that_cannot_be(device: torch.device) -> None:
    history = History(LayerShape(4, 16, 2), torch.float32, device)
    num_rows = len(history.memory.table.req_to_token)
    indirection = torch.zeros(num_rows, 20, dtype=torch.int32, device=device)
    history.place([1, 2], [19, 19])
    prefixes = [SharedPrefix((1, 2), 4)]
    decodes = Batch.of([1, 2], [18, 18], [1, 1], 0)
    for match, batch, given in [
        (rf"int32 \[{num_rows}, n\] on", decodes, indirection[1:]),
        ("n of 21 or more", Batch.of([1], [20], [1], 0), indirection),
        ("got torch.int64", decodes, indirection.long()),
        ("nothing may be dropped", with_gaps(decodes, [0, 3]), indirection),
        ("each sequence reads its own", decodes.sharing(prefixes, 2), indirection),
        (
            "rows hold their own tokens in order",
            over_rings(Batch.of([1], [6], [2], 1), Ring(0, 16)),
            indirection,
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            Step.of(over_beams(batch, given), history.memory)
    with pytest.raises(ValueError, match="tokens dropped by sequences of Beams"):
        with_gaps(over_beams(decodes, indirection), [0, 3])
    with pytest.raises(ValueError, match="each sequence reads its own"):
        over_beams(decodes, indirection).sharing(prefixes, 2)
    step = Step.of(over_beams(decodes, indirection), history.memory)
    (backend,) = make_backends("torch", device, [history.shape])
    with pytest.raises(ValueError, match="with an indirection"):
        backend.entry_scores(torch.zeros(2, 64, device=device), step)


def test_a_table_of_beams_names_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    beams = torch.randint(3, (2, 3, 9), dtype=torch.int32, device=device)
    rows = torch.tensor([[5, 1, 4], [2, 7, 3]], device=device)
    out = torch.full((9, 9), -1, dtype=torch.int32, device=device)
    beam_indirection(beams, rows, out)
    for request in range(2):
        for beam in range(3):
            expected = [int(rows[request, other]) for other in beams[request, beam].tolist()]
            assert out[int(rows[request, beam])].tolist() == expected
    assert (out[[0, 6, 8]] == -1).all()
    before = out.clone()
    for wrong in (
        (beams.long(), rows, out),
        (beams, rows[:1], out),
        (beams, rows.int(), out),
        (beams, rows, out[:, :8]),
    ):
        with pytest.raises(ValueError, match="must be int"):
            beam_indirection(*wrong)
    assert torch.equal(out, before)
