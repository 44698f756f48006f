"""How a kernel holds a head of K or V in a tile, and what it has to know of the stored elements."""

from .kv_format import Elements


def constants_of(elements: Elements, dim: int) -> tuple[int, bool, int, bool, bool, int]:
    """Returns what kernels know of the elements of a head of `dim`, as constants: bits, whether they are fp8,
    the elements of a group (0: all of the head), whether there is a middle, whether scales are static, and the
    logarithm of the rotation's block (0: not rotated).

    Raises ValueError where a head does not fit them: groups have to be a power of 2, and of 4 bits at least 2
    elements.
    """
    elements.check("K or V", dim)
    group = elements.group if elements.is_quantised else 0
    if group & (group - 1) or (group == 1 and elements.bits == 4):
        raise ValueError(
            f"groups of {group} elements of {elements.bits} bits; the kernels take powers of 2, of 4 bits at "
            "least 2: choose another format, or the torch backend"
        )
    log_block = (dim & -dim).bit_length() - 1 if elements.is_rotated else 0
    return (
        elements.bits,
        bool(elements.is_float),
        group,
        bool(elements.has_middle),
        bool(elements.is_static),
        log_block,
    )
