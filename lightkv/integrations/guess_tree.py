"""A tree of guesses of how a text goes on, which one forward pass verifies.

The root is the text's last token, which has no K/V yet. Lines of guesses that begin alike share their first
nodes:

    root ─┬─ a ─── b ─┬─ c          lines  a b c,  a b d,  e
          │           └─ d
          └─ e

>>> tree = GuessTree.of_lines(7, [[1, 2, 3], [1, 2, 4], [5]])
>>> tree.tokens, tree.parents, tree.depths
([7, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 2, 0], [0, 1, 2, 3, 3, 1])
>>> tree.accept([1, 2, 4, 9, 8, 9])  # the token that the model chooses after each node
[0, 1, 2, 4]
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class GuessTree(NamedTuple):
    """Nodes, each with its token, its parent (-1 for the root, node 0) and its depth; parents come first."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    @classmethod
    def of_lines(cls, root: int, lines: Sequence[Sequence[int]], most: int = 2**31) -> "GuessTree":
        """Returns the tree of `lines` after the token `root`, of at most `most` nodes; what does not fit is
        left out, of the last lines first."""
        tree = cls([root], [-1], [0])
        children: dict[tuple[int, int], int] = {}
        for line in lines:
            node = 0
            for token in line:
                child = children.get((node, token))
                if child is None:
                    if len(tree.tokens) == most:
                        break
                    child = children[node, token] = len(tree.tokens)
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    tree.depths.append(tree.depths[node] + 1)
                node = child
        return tree

    @property
    def is_line(self) -> bool:
        """Whether each node's parent is the node before it."""
        return self.depths == list(range(len(self.depths)))

    def bits(self) -> np.ndarray:
        """Returns which nodes each node sees, itself and its ancestors, as `TreeMask` takes it: int64
        `[n, words]`."""
        count = len(self.tokens)
        seen = np.zeros((count, -(-count // 64)), dtype=np.uint64)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] = seen[parent]
            seen[node, node // 64] |= np.uint64(1 << node % 64)
        return seen.view(np.int64)

    def accept(self, chosen: Sequence[int]) -> list[int]:
        """Returns the nodes that are right, the root first, where `chosen` is the token that the model chooses
        after each node."""
        path = [0]
        children = {(parent, token): node for node, (token, parent) in enumerate(zip(*self[:2], strict=True))}
        while (node := children.get((path[-1], chosen[path[-1]]))) is not None:
            path.append(node)
        return path
