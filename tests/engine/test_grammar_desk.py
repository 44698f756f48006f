"""The desk of grammars: what is compiled and when, what is kept and for how long, and every count after it."""

import random

import pytest

from lightkv.errors import CheckFailed
from lightkv.router.engine.grammars.grammar_desk import (
    IDLE_SECONDS,
    LEAST_BYTES,
    MAX_IDLE_BYTES,
    MAX_REFUSED,
    MAX_WAITING,
    Compile,
    Compiled,
    Forget,
    GrammarDesk,
    TooManyGrammars,
)
from lightkv.router.sampling_params import Grammar, InvalidParams

MIB = 2**20


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def grammar(number: int) -> Grammar:
    return Grammar("regex", f"a{{{number}}}")


def compile_all(desk: GrammarDesk) -> list[Compile | Forget]:
    """Carries out the orders until there are none. Returns them."""
    done: list[Compile | Forget] = []
    while orders := desk.orders():
        done += orders
        for order in orders:
            if isinstance(order, Compile):
                desk.take(Compiled(order.grammar_id))
    return done


def test_one_is_compiled_at_a_time_in_the_order_of_requests() -> None:
    desk = GrammarDesk()
    ids = [desk.hold([str(i)], grammar(i), MIB) for i in range(3)]
    assert desk.hold(["3"], grammar(0), MIB) == ids[0]  # shared
    assert desk.orders() == [Compile(ids[0], grammar(0))]
    assert desk.orders() == []
    assert desk.is_compiling
    assert not desk.is_ready(ids[0])
    assert sorted(desk.take(Compiled(ids[0]))) == ["0", "3"]
    assert desk.is_ready(ids[0])
    assert desk.orders() == [Compile(ids[1], grammar(1))]
    with pytest.raises(ValueError, match="is not being compiled"):
        desk.take(Compiled(ids[2]))
    with pytest.raises(ValueError, match="holds a grammar already"):
        desk.hold(["0"], grammar(5), MIB)
    desk.check()


@pytest.mark.parametrize("is_beyond", [False, True])
def test_what_requests_hold_is_bounded_in_bytes(is_beyond: bool) -> None:
    """At the bound one more is compiled, and beyond it the request waits until another one ends."""
    desk = GrammarDesk(max_bytes=3 * MIB)
    for i in range(3):
        desk.hold([str(i)], grammar(i), MIB + (i == 2 and is_beyond))
    compile_all(desk)
    assert desk.num_bytes == (2 if is_beyond else 3) * MIB
    assert desk.is_ready(3) is not is_beyond
    desk.release("0")
    compile_all(desk)
    assert desk.is_ready(3)
    desk.check()


def test_one_that_is_larger_than_the_bound_is_compiled_alone() -> None:
    desk = GrammarDesk(max_bytes=3 * MIB)
    desk.hold(["small"], grammar(0), MIB)
    large = desk.hold(["large"], grammar(1), 9 * MIB)
    compile_all(desk)
    assert not desk.is_ready(large)
    desk.release("small")
    compile_all(desk)
    assert desk.is_ready(large)
    assert desk.num_bytes == 9 * MIB


def test_idle_ones_are_kept_by_bytes_and_for_a_time() -> None:
    clock = FakeClock()
    desk = GrammarDesk(clock=clock)
    most = MAX_IDLE_BYTES // (4 * MIB)
    for i in range(most):
        desk.hold([str(i)], grammar(i), 4 * MIB)
        compile_all(desk)
        desk.release(str(i))
        assert compile_all(desk) == []
    desk.hold(["again"], grammar(0), 4 * MIB)  # the oldest, which is now the latest
    desk.release("again")
    desk.hold(["more"], grammar(most), 1)  # counts for LEAST_BYTES
    compile_all(desk)
    desk.release("more")
    assert compile_all(desk) == [Forget(2)]
    assert desk.num_bytes == MAX_IDLE_BYTES - 4 * MIB + LEAST_BYTES
    clock.now += IDLE_SECONDS
    assert compile_all(desk) == []
    clock.now += 0.1
    assert len(compile_all(desk)) == most
    assert desk.num_bytes == 0
    desk.check()


def test_a_spoilt_one_is_compiled_anew_for_later_requests() -> None:
    desk = GrammarDesk()
    first = desk.hold(["a"], grammar(1), MIB)
    desk.hold(["b"], grammar(1), MIB)
    compile_all(desk)
    desk.release("a", is_spoilt=True)
    second = desk.hold(["c"], grammar(1), MIB)
    assert second != first
    compile_all(desk)
    desk.release("b")
    assert compile_all(desk) == [Forget(first)]
    assert desk.is_ready(second)
    desk.check()


def test_what_fails_leaves_nothing_and_may_be_tried_again() -> None:
    desk = GrammarDesk()
    desk.hold(["a"], grammar(1), MIB)
    (order,) = desk.orders()
    assert desk.take(Compiled(order.grammar_id, "no")) == ["a"]
    assert desk.num_bytes == 0
    desk.check()
    desk.hold(["a"], grammar(1), MIB)
    compile_all(desk)
    assert desk.num_bytes == MIB


def test_those_that_killed_a_device_are_refused_up_to_a_number() -> None:
    desk = GrammarDesk()
    for i in range(MAX_REFUSED + 1):
        desk.hold(["a"], grammar(i), MIB)
        desk.hold(["b"], grammar(-1), MIB)  # waits, and is not to blame
        desk.orders()
        assert desk.lose_device(is_compilers_fault=True)
        desk.check()
    assert not desk.lose_device(is_compilers_fault=True)  # it was compiling nothing
    for i in (1, MAX_REFUSED):
        with pytest.raises(InvalidParams, match="a worker died"):
            desk.hold(["a"], grammar(i), MIB)
    desk.hold(["a"], grammar(0), MIB)  # the oldest is tried again
    desk.hold(["b"], grammar(-1), MIB)
    desk.check()


def test_every_count_holds_in_random_lives() -> None:
    clock = FakeClock()
    rng = random.Random(0)
    desk = GrammarDesk(max_bytes=8 * MIB, clock=clock)
    held: list[str] = []
    on_device: set[int] = set()
    compiling: list[int] = []
    for step in range(4000):
        clock.now += rng.random() * 4
        match rng.randrange(8):
            case 0 | 1 | 2 if len(held) < 20:
                owner = rng.choice([b"a", b"b"])
                desk.hold([f"r{step}"], grammar(rng.randrange(12)), rng.randrange(3 * MIB), owner)
                held.append(f"r{step}")
            case 3 | 4 if held:
                desk.release(held.pop(rng.randrange(len(held))), is_spoilt=rng.random() < 0.1)
            case 5 | 6 if compiling:
                error = "no" if rng.random() < 0.1 else ""
                for name in desk.take(Compiled(compiling[0], error)):
                    if error:
                        held.remove(name)
                if not error:
                    on_device.add(compiling[0])
                compiling.clear()
        for order in desk.orders():
            if isinstance(order, Forget):
                on_device.remove(order.grammar_id)
            else:
                assert not compiling
                compiling.append(order.grammar_id)
        assert on_device == {one.id for one in desk._by_id.values() if one.is_ready}
        desk.check()
    for name in held:
        desk.release(name)
    if compiling:
        desk.take(Compiled(compiling[0]))
    clock.now += 2 * IDLE_SECONDS
    desk.orders()
    desk.check()
    assert desk.num_bytes == 0


def test_the_keys_take_turns() -> None:
    """One that comes after many of another key is compiled second, not last."""
    desk = GrammarDesk()
    for i in range(100):
        desk.hold([f"greedy{i}"], grammar(i), MIB, b"greedy")
    desk.orders()  # the first is being compiled
    late = desk.hold(["honest"], grammar(100), MIB, b"honest")
    desk.take(Compiled(1))
    assert [order.grammar_id for order in compile_all(desk)[:3]] == [2, late, 3]
    desk.check()


def test_one_that_waits_behind_another_clients_does_not_hold_up_a_second_client() -> None:
    """The same grammar is compiled once, in the turn of the client that has less before it."""
    desk = GrammarDesk()
    for i in range(100):
        desk.hold([f"greedy{i}"], grammar(i), MIB, b"greedy")
    desk.orders()  # the first is being compiled
    assert desk.hold(["honest"], grammar(99), MIB, b"honest") == 100
    desk.check()
    desk.take(Compiled(1))
    assert [order.grammar_id for order in compile_all(desk)[:3]] == [2, 100, 3]
    desk.check()


@pytest.mark.parametrize("owner", [b"greedy", b"honest"])
def test_one_without_room_holds_up_none_that_has(owner: bytes) -> None:
    """Neither of its own key nor of another one; idle ones are not forgotten for what cannot be compiled."""
    desk = GrammarDesk(max_bytes=4 * MIB)
    desk.hold(["idle"], grammar(9), MIB // 2, b"greedy")
    desk.hold(["held"], grammar(0), 2 * MIB, b"greedy")
    compile_all(desk)
    desk.release("idle")
    large = desk.hold(["large"], grammar(1), 3 * MIB, b"greedy")
    small = desk.hold(["small"], grammar(2), MIB, owner)
    assert compile_all(desk) == [Compile(small, grammar(2))]
    assert not desk.is_ready(large)
    desk.check()
    desk.release("held")
    assert compile_all(desk) == [Forget(1), Forget(2), Compile(large, grammar(1))]
    desk.check()


def test_a_key_may_have_a_number_of_grammars_waiting() -> None:
    desk = GrammarDesk()
    for i in range(MAX_WAITING):
        desk.hold([str(i)], grammar(i), MIB, b"greedy")
    with pytest.raises(TooManyGrammars, match=f"{MAX_WAITING} grammars"):
        desk.hold(["beyond"], grammar(MAX_WAITING), MIB, b"greedy")
    desk.check()
    desk.hold(["shared"], grammar(3), MIB, b"greedy")  # which waits already
    desk.hold(["other"], grammar(MAX_WAITING + 1), MIB, b"honest")
    desk.orders()  # one is being compiled, and waits no more
    desk.hold(["beyond"], grammar(MAX_WAITING), MIB, b"greedy")
    desk.check()


def test_those_that_nobody_waits_for_leave_the_queue_with_their_texts() -> None:
    desk = GrammarDesk()
    desk.hold(["first"], grammar(0), MIB)
    desk.orders()
    for i in range(10 * MAX_WAITING):  # while the first is being compiled
        desk.hold(["a"], grammar(i + 1), MIB)
        desk.release("a")
    assert len(desk._queue) == 0
    assert list(desk._by_id) == [1]
    desk.check()


def test_a_wrong_count_is_found() -> None:
    desk = GrammarDesk()
    desk.hold(["a"], grammar(1), MIB)
    compile_all(desk)
    desk.num_bytes += 1
    with pytest.raises(CheckFailed, match="are counted"):
        desk.check()
    desk.num_bytes -= 1
    desk._by_id[1].names.add("b")
    with pytest.raises(CheckFailed, match="requests hold grammars"):
        desk.check()
    desk._by_id[1].names.remove("b")
    desk._queue.push(desk._by_id[1])
    with pytest.raises(CheckFailed, match="are queued"):
        desk.check()
