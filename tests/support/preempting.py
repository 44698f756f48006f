"""Estimates of lengths, for engines of tests whose requests may be preempted."""

from lightkv.router.engine.admission import Admission
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.simulate.admissions import SimulatedAdmission


def expecting(length: int) -> OutputLengths:
    """Returns the estimates after many outputs of this length."""
    lengths = OutputLengths()
    for _ in range(OutputLengths.num_recent):
        lengths.observe(length)
    return lengths


def counted_by(lengths: OutputLengths | None) -> Admission:
    return SimulatedAdmission(lengths, guarantees=lengths is None, reserve=0.03)
