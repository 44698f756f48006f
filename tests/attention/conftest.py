"""All tests of this folder run kernels."""

from tests.support.interpreter import quick_interpreter

__all__ = ["quick_interpreter"]
