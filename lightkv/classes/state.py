"""The class of recurrent and convolutional layers, which read the state that the token before has left.

    entry      0                        last snapshot        length
               ├───────── nothing is kept ───────┼─── nothing ───┤ the state after `length` tokens
                                                 └ the state after so many tokens, for others

A sequence goes on only where there is a state after exactly as many tokens as it has, so a *tail* of this class
has no tokens: it is one snapshot, at the end of its segment.
"""


class State:
    """A state that stands for all earlier tokens, and none of them."""

    def __str__(self) -> str:
        return "a state of all tokens"

    def first_seen(self, position: int) -> int:
        return position

    def boundary(self, limit: int) -> int:
        return 0

    def first_kept(self, length: int) -> int:
        return length

    def keeps_chunk_end(self, length: int, kept: int) -> bool:
        """Returns whether the state at the end of a chunk, after `length` tokens, is kept on a path whose last
        snapshot stands after `kept`: so there are at most log2(n) + 1 in n tokens, and a prompt that diverges
        anywhere computes less than half of what it shares and a chunk again."""
        return length >= 2 * kept
