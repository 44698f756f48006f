"""The queue in which owners take turns."""

from lightkv.router.engine.grammars.fair_queue import FairQueue


class Waiting:
    def __init__(self, name: str) -> None:
        self.name = name
        self.owner = name[:1].encode()


def names(queue: FairQueue[Waiting]) -> list[str]:
    """Empties the queue."""
    found = []
    while (one := queue.pop()) is not None:
        found.append(one.name)
    return found


def test_the_lines_take_turns_and_the_longest_gives_way() -> None:
    queue: FairQueue[Waiting] = FairQueue(6)
    made = {name: Waiting(name) for name in ("a1", "a2", "a3", "a4", "b1", "c1")}
    assert [queue.push(one) for one in made.values()] == [None] * 6
    assert queue.push(Waiting("b2")) is made["a4"]  # the newest of the longest line
    one_more = Waiting("a5")
    assert queue.push(one_more) is one_more
    assert queue.remove(made["a2"])
    assert not queue.remove(made["a2"])
    assert [one.name for one in queue] == ["a1", "a3", "b1", "b2", "c1"]
    assert [queue.num_of(owner) for owner in (b"a", b"b", b"d")] == [2, 2, 0]
    assert names(queue) == ["a1", "b1", "c1", "a3", "b2"]
    assert queue.pop() is None
    assert len(queue) == 0


def test_one_that_a_second_owner_waits_for_moves_to_the_line_in_which_it_is_sooner() -> None:
    queue: FairQueue[Waiting] = FairQueue(6)
    made = {name: Waiting(name) for name in ("a1", "a2", "a3", "b1", "b2")}
    for one in made.values():
        queue.push(one)
    queue.share(made["a3"], b"b")  # as many are before it there
    queue.share(made["b1"], b"a")
    queue.share(made["a1"], b"a")
    queue.share(Waiting("x"), b"a")  # does not wait
    assert [one.name for one in queue] == ["a1", "a2", "a3", "b1", "b2"]
    queue.share(made["a3"], b"c")
    assert [queue.num_of(owner) for owner in (b"a", b"b", b"c")] == [2, 2, 1]
    assert queue.push(Waiting("a4")) is None  # it counts once
    assert names(queue) == ["a1", "b1", "a3", "a2", "b2", "a4"]
    assert len(queue) == 0


def test_what_may_not_go_keeps_its_place_and_holds_nobody_up() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    for name in ("a1", "a2", "b1", "b2"):
        queue.push(Waiting(name))
    taken = [queue.pop(lambda one: one.name != "a1") for _ in range(4)]
    assert [one and one.name for one in taken] == ["a2", "b1", "b2", None]
    assert names(queue) == ["a1"]
