"""The slots of shared segments."""

from collections.abc import Sequence

import torch

from lightkv.errors import CheckFailed
from lightkv.holdings import Holdings


class SegmentSlots:
    """The slots of segments in each of `num_classes` classes of layers.

    of_class: by class, of each segment: int32 slots, `[groups of the class, n]`, of all its tokens in class 0,
    and of the last n in the others. Where there is one group in all, `[n]`.
    """

    def __init__(self, num_classes: int) -> None:
        self.of_class: list[dict[int, torch.Tensor]] = [{} for _ in range(num_classes)]

    def slots(self, cls: int, segments: Sequence[int]) -> torch.Tensor:
        """Returns the slots of these segments in a class, one after the other."""
        return torch.cat([self.of_class[cls][segment] for segment in segments], -1)

    def split(self, segment: int, at: int, head: int) -> None:
        """Moves the first `at` tokens of a segment to a new one, `head`."""
        rest = self.of_class[0][segment].shape[-1] - at
        for found in self.of_class:
            slots = found.get(segment)
            if slots is not None and (above := slots.shape[-1] - rest) > 0:
                found[head], found[segment] = slots[..., :above], slots[..., above:]

    def merge(self, segment: int, head: int) -> None:
        """Moves the tokens of `head` to the front of a segment."""
        for found in self.of_class:
            if head in found:
                found[segment] = torch.cat((found.pop(head), found[segment]), -1)

    def cut(self, segment: int, start: int) -> list[torch.Tensor]:
        """Removes the tokens of a segment from `start` on. Returns their slots in each class."""
        num_cut = self.of_class[0][segment].shape[-1] - start
        cut = []
        for found in self.of_class:
            if (slots := found.pop(segment, None)) is not None:
                if keep := max(slots.shape[-1] - num_cut, 0):
                    found[segment] = slots[..., :keep]
                cut.append(slots[..., keep:])
        return cut

    def forget(self, segment: int) -> None:
        """Removes a segment, whose slots stay with the row that has them."""
        for found in self.of_class:
            found.pop(segment, None)

    def check(self, holdings: Holdings) -> None:
        """Raises CheckFailed unless segments and parts have the ledger's ids and numbers of tokens."""
        for cls, slots in enumerate(self.of_class):
            lengths = holdings.lengths(cls)
            found = {segment: some.shape[-1] for segment, some in slots.items()}
            for segment in found.keys() | lengths.keys():
                if found.get(segment) != lengths.get(segment):
                    raise CheckFailed(
                        f"segment {segment} has slots for {found.get(segment, 'no')} tokens in class {cls}, "
                        f"and {lengths.get(segment, 'no')} tokens by the ledger's count"
                    )
