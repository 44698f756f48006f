"""Tests of the machine's description, which is stored beside every figure."""

from pathlib import Path

import torch

from bench.common.report import machine, processor_name


def test_the_processor_and_its_instructions_are_named(tmp_path: Path) -> None:
    instructions = f" ({torch.backends.cpu.get_cpu_capability()})"
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: Fast: CPU 3000\nprocessor\t: 1\nmodel name\t: Another\n"
    )
    assert processor_name(cpuinfo) == "Fast: CPU 3000" + instructions
    assert machine()["processor"] == processor_name()


def test_a_system_that_does_not_name_its_processor_gives_its_kind(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    names = [processor_name(cpuinfo)]
    cpuinfo.write_text("processor\t: 0\n")
    names.append(processor_name(cpuinfo))
    assert names[0] == names[1]
    assert not names[0].startswith(" ")
