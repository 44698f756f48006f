"""No kernel compares a tuple that may hold None with None, which Triton 3.6 does not compile."""

import ast
from collections import defaultdict
from pathlib import Path

import triton_kernels


def _with_none(node: ast.AST) -> ast.expr | None:
    """Returns what is compared with None; else None."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        return node.left
    return None


def compared_tuples(sources: list[str]) -> list[str]:
    """Returns the parameters of kernels that are compared with None, and have a field that is, be it in a
    kernel that they are passed on to."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    every = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    functions = {one.name: one for one in every if any("jit" in ast.unparse(by) for by in one.decorator_list)}
    parameters = {name: [one.arg for one in node.args.args] for name, node in functions.items()}
    compared: dict[str, set[str]] = defaultdict(set)
    holders: dict[str, set[str]] = defaultdict(set)
    passed: list[tuple[str, str, str, str]] = []
    for name, function in functions.items():
        for node in ast.walk(function):
            match _with_none(node):
                case ast.Name(id=own):
                    compared[name].add(own)
                case ast.Attribute(value=ast.Name(id=own)):
                    holders[name].add(own)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                names = [one.id if isinstance(one, ast.Name) else "" for one in node.args]
                pairs = zip(names, parameters[node.func.id], strict=False)
                passed += [(name, own, node.func.id, other) for own, other in pairs]
    for _ in functions:  # at most as often as one calls the other
        for name, own, called, other in passed:
            if other in holders[called]:
                holders[name].add(own)
    return [f"{name}: {own}" for name in functions for own in sorted(compared[name] & holders[name])]


def test_no_kernel_compares_a_tuple_that_holds_none_with_none() -> None:
    folder = Path(triton_kernels.__path__[0])
    assert compared_tuples([path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]) == []


def test_a_comparison_is_found_where_the_tuple_is_passed_on() -> None:
    source = """
@triton.jit
def _inner(x, norm):
    return x if norm.bias is None else x + norm.bias

@triton.jit
def _outer(x, heads, post, scale):
    if post is not None:
        x = _inner(x, post)
    if heads is not None:
        x = x * heads.stride
    return x if scale is None else x * scale
"""
    assert compared_tuples([source]) == ["_outer: post"]
