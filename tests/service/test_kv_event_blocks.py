"""Virtual blocks of 64 tokens, made of a ledger's changes, against the ledger's own tree."""

import ast
import zipfile
from array import array
from typing import Any

import msgspec
import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.service.kv_events.blocks import BlockTree
from lightkv.router.service.kv_events.events import BlockStored, KVEvent, KVEventBatch
from tests.support import kv_events as oracle
from tests.support.kv_events import SALTED, Blocks, LedgerLife, blocks_of

STRUCTS = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")


def ids(first: int, count: int) -> bytes:
    return array("i", range(first, first + count)).tobytes()


def batch(events: list[KVEvent]) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(1.5, events, 0))


def noted() -> tuple[TokenLedger, BlockTree]:
    ledger = TokenLedger(4000, 4, 2000)
    ledger.tree.note_changes()
    return ledger, BlockTree()


def num_blocks(tree: BlockTree) -> int:
    return sum(len(event.block_hashes) for event in tree.stored())


def test_a_ledger_notes_nothing_unless_it_is_asked_to() -> None:
    ledger = TokenLedger(1000, 4, 500)
    sequence = ledger.open(ids(0, 200))
    ledger.extend([sequence], [200])
    ledger.publish(sequence)
    ledger.close(sequence)
    ledger.evict(100)
    assert ledger.tree.drain_changes() == []
    assert ledger._state.tree.changes is None


def test_a_block_is_stored_with_its_last_token_and_removed_with_its_first_to_leave() -> None:
    ledger, tree = noted()
    sequence = ledger.open(ids(0, 300))
    ledger.extend([sequence], [63])
    ledger.publish(sequence)
    assert tree.apply(ledger.tree.drain_changes()) == []
    ledger.extend([sequence], [66])
    ledger.publish(sequence)
    (stored,) = tree.apply(ledger.tree.drain_changes())
    assert isinstance(stored, BlockStored)
    assert (len(stored.block_hashes), stored.parent_block_hash) == (2, None)
    assert stored.token_ids == list(range(128))
    ledger.close(sequence)  # held or cached is the same
    assert tree.apply(ledger.tree.drain_changes()) == []
    ledger.evict(1)  # the 129th
    assert tree.apply(ledger.tree.drain_changes()) == []
    ledger.evict(1)
    (removed,) = tree.apply(ledger.tree.drain_changes())
    assert removed.block_hashes == stored.block_hashes[1:]
    assert num_blocks(tree) == 1


def test_the_oracle_decodes_what_is_sent() -> None:
    ledger, tree = noted()
    for namespace in ((), SALTED):
        sequence = ledger.open(ids(0, 200), namespace)
        ledger.extend([sequence], [200])
        ledger.close(sequence)
    payload = batch(tree.apply(ledger.tree.drain_changes()))
    decoded = Blocks().apply(payload)
    assert (decoded.ts, decoded.data_parallel_rank) == (1.5, 0)
    first, salted = decoded.events
    assert (first.medium, first.lora_id, first.lora_name, first.extra_keys) == ("GPU", None, None, None)
    assert salted.extra_keys[1:] == [None, None]
    assert not set(first.block_hashes) & set(salted.block_hashes)
    plain = msgspec.msgpack.decode(payload)
    assert plain[0] == 1.5
    assert set(plain[1][0]) == {
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name"),
    }
    assert all(0 <= name < 2**64 for name in plain[1][0]["block_hashes"])


@pytest.fixture
def vllm_structs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The structs in vLLM's wheel; the module itself would bring all of vLLM."""
    wheel = request.config.getoption("vllm_wheel")
    if wheel is None:
        pytest.skip("needs --vllm-wheel FILE, a wheel of vLLM")
    with zipfile.ZipFile(wheel) as opened:
        module = ast.parse(opened.read("vllm/distributed/kv_events.py"))
    module.body = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in STRUCTS]
    names: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": bytes | int}
    exec(compile(module, "kv_events.py", "exec"), names)
    return names


@pytest.mark.slow
def test_vllms_own_structs_decode_what_is_sent(vllm_structs: dict[str, Any]) -> None:
    for name in STRUCTS[2:]:
        theirs, ours = (
            msgspec.structs.fields(vllm_structs[name]),
            msgspec.structs.fields(getattr(oracle, name)),
        )
        assert [(field.name, field.default) for field in theirs] == [
            (field.name, field.default) for field in ours
        ]
    life, tree = LedgerLife(7), BlockTree()
    life.ledger.tree.note_changes()
    decoder = msgspec.msgpack.Decoder(vllm_structs["KVEventBatch"])
    kinds = set()
    for _ in range(500):
        life.step()
        events = [*tree.apply(life.ledger.tree.drain_changes())]
        for sent, decoded in zip(events, decoder.decode(batch(events)).events, strict=True):
            kinds.add(type(decoded).__name__)
            assert msgspec.to_builtins(decoded) == msgspec.to_builtins(sent)
    (cleared,) = decoder.decode(batch([next(tree.restart([]))])).events
    assert kinds | {type(cleared).__name__} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_names_are_the_same_in_every_replica_but_for_namespaces() -> None:
    names = []
    for _ in range(2):
        ledger, tree = noted()
        for namespace in ((), SALTED):
            sequence = ledger.open(ids(0, 130), namespace)
            ledger.extend([sequence], [130])
            ledger.close(sequence)
        plain, salted = tree.apply(ledger.tree.drain_changes())
        names.append((plain.block_hashes, salted.block_hashes))
    assert names[0][0] == names[1][0]
    # A name that is made of a tenant's API key does not show whether a guessed key is right.
    assert not set(names[0][1]) & set(names[1][1])


def test_what_no_other_request_can_hit_is_not_told() -> None:
    ledger, tree = noted()
    sequence = ledger.open(ids(0, 200), ("salt", object()))  # a request whose prompt is scored
    ledger.extend([sequence], [150])
    ledger.publish(sequence)
    ledger.extend([sequence], [50])
    ledger.close(sequence)
    other = ledger.open(ids(0, 100))
    ledger.evict(70)
    assert tree.apply(ledger.tree.drain_changes()) == []
    assert (num_blocks(tree), list(tree.stored())) == (0, [])
    ledger.close(other)


def test_long_paths_come_in_several_events() -> None:
    ledger = TokenLedger(20_000, 4, 20_000)
    ledger.tree.note_changes()
    sequence = ledger.open(ids(0, 10_000))
    ledger.extend([sequence], [10_000])
    ledger.publish(sequence)
    blocks = Blocks()
    events = BlockTree().apply(ledger.tree.drain_changes())
    blocks.apply(batch(events))
    assert [len(event.block_hashes) for event in events] == [64, 64, 28]
    assert blocks.prefixes() == blocks_of(ledger)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_follow_a_random_life(seed: int) -> None:
    life, tree, blocks = LedgerLife(seed), BlockTree(), Blocks()
    for _ in range(100):  # the tree is taken up while it is in use
        life.step()
    life.ledger.tree.note_changes()
    blocks.apply(batch(list(tree.restart(life.ledger.tree.contents()))))
    most = 0
    for step in range(1500):
        life.step()
        if step % 5 == 0:
            blocks.apply(batch(tree.apply(life.ledger.tree.drain_changes())))
            expected = blocks_of(life.ledger)
            assert blocks.prefixes() == expected
            assert num_blocks(tree) == len(blocks.known)
            most = max(most, num_blocks(tree))
        if step % 250 == 0:
            life.ledger.check()
            anew = Blocks()
            anew.apply(batch(list(tree.stored())))
            assert anew.known == blocks.known
    assert most > 20
    assert life.num_edits > 1000
