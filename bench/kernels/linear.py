"""Compares the products of few tokens with cuBLAS on the weights of a model's layers.

    python -m bench.kernels.linear --out bench/results/linear-h200.json

Every weight of a shape is another tensor, so none is found in the cache. A row's floor is the bytes of its
weight over the bandwidth that a reduction reaches in this run. The sides run alternately, each as a CUDA graph.
With `--int4` the weights have 4 bits and scales in groups of 128, and the other side is humming-kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from lightkv.integrations.weights.humming import HummingProduct, LibraryTensors, in_order
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layers.int4_linear import (
    MAX_TOKENS,
    Int4Launch,
    int4_launch,
    int4_linear_reference,
)
from lightkv.triton_kernels.layers.linear import LinearLaunch, linear, linear_launch, tickets_for

# Rows and columns of the weights: joined q, k and v; attention's output; joined gate and up; down; the head.
SHAPES = {
    "llama-3-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "llama-3.2-3b": [(5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192), (128256, 3072)],
    "llama-3-70b": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
    "qwen3-moe": [(5120, 2048), (2048, 4096), (151936, 2048)],
}
ROUNDS = 5
GROUP = 128  # columns with one scale, of weights of 4 bits
TOLERANCE = 0.01  # of the norm of the product, in bfloat16


def capture(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Returns the graph of `run`, which has run once before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Measures the microseconds of one of the `calls` in a graph."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / calls


def bandwidth() -> float:
    """Measures the bytes per second that a reduction over 4 GiB reads."""
    data = torch.ones(2**30, dtype=torch.float32, device="cuda")
    graph = capture(lambda: data.sum())
    return data.nbytes / min(replay_us(graph, 1) for _ in range(10)) * 1e6


def measure(num_tokens: int, weights: list[Tensor]) -> dict[str, Spread]:
    """Measures a product in microseconds, by lightkv and by cuBLAS. Refuses figures of a wrong product."""
    dim = weights[0].shape[1]
    x = torch.randn(num_tokens, dim, device="cuda").bfloat16()
    tickets = tickets_for(weights[0])
    _require_equal(linear(x, weights[0], None, tickets), functional.linear(x.float(), weights[0].float()))
    used = weights * max(1, 16 // len(weights))
    graphs = {
        "lightkv": capture(lambda: [linear(x, weight, None, tickets) for weight in used]),
        "cublas": capture(lambda: [functional.linear(x, weight) for weight in used]),
    }
    return _alternated(graphs, len(used))


def int4_weight(num_rows: int, dim: int) -> HummingProduct:
    """Returns random numbers of 4 bits, as the library holds them."""
    words = torch.randint(-(2**31), 2**31, (num_rows, dim // 8), device="cuda").int()
    scales = torch.rand(num_rows, dim // GROUP, device="cuda").bfloat16() * dim**-0.5
    tensors = LibraryTensors("uint4", words, scales, (1, GROUP))
    return HummingProduct(in_order(tensors, None, torch.bfloat16))


def measure_int4(num_tokens: int, weights: list[HummingProduct]) -> dict[str, Spread]:
    """Measures a product with weights of 4 bits in microseconds, by lightkv and by the library alone."""
    (num_groups, num_rows), few = weights[0]._tensors["weight_scale"].shape, [one._few for one in weights]
    x = torch.randn(num_tokens, num_groups * GROUP, device="cuda").bfloat16()
    if few[0] is None:
        refuse("lightkv has no kernel for 4 bits on this device, or for this version of humming-kernels")
    _require_equal(weights[0].matmul(x), int4_linear_reference(x, few[0][0], None, num_rows))
    used = weights * max(1, 16 // len(weights))
    graphs = {"lightkv": capture(lambda: [weight.matmul(x) for weight in used])}
    for weight in weights:
        weight._few = None
    graphs["humming"] = capture(lambda: [weight.matmul(x) for weight in used])
    for weight, held in zip(weights, few, strict=True):
        weight._few = held
    return _alternated(graphs, len(used))


def _require_equal(found: Tensor, wanted: Tensor) -> None:
    error = float((found.float() - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        refuse(f"{len(wanted)} tokens times {wanted.shape[1]} rows are off by {error}")


def _alternated(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, Spread]:
    sides = {name: lambda graph=graph: replay_us(graph, calls) for name, graph in graphs.items()}
    found = list(alternate(ROUNDS, sides))
    return {name: Spread.of([times[name] for times in found]) for name in sides}


Cases = Iterator[tuple[int, LinearLaunch | Int4Launch | None, dict[str, Spread]]]


def plain_case(num_rows: int, dim: int, count: int, tokens: Sequence[int]) -> Cases:
    """Measures `count` weights in bfloat16 with each number of tokens, and returns the launches, too."""
    weights = [(torch.randn(num_rows, dim, device="cuda") * dim**-0.5).bfloat16() for _ in range(count)]
    device = tuning.device_class(weights[0].device)
    for num_tokens in tokens:
        yield num_tokens, linear_launch(device, num_tokens, num_rows, dim, 2), measure(num_tokens, weights)


def int4_case(num_rows: int, dim: int, count: int, tokens: Sequence[int]) -> Cases:
    """Does what `plain_case` does with weights of 4 bits, with the numbers of tokens that the kernel takes."""
    weights = [int4_weight(num_rows, dim) for _ in range(count)]
    launch = int4_launch(tuning.device_class(weights[0].device), num_rows, dim // GROUP)
    for num_tokens in tokens:
        yield num_tokens, launch, measure_int4(num_tokens, weights)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 8, 16, 32, 48, 64])
    arguments.add_argument("--int4", action="store_true", help="weights of 4 bits, of up to 8 tokens")
    options = arguments.parse_args()
    if options.int4 and max(options.tokens) > MAX_TOKENS:
        refuse(f"--int4 is for up to {MAX_TOKENS} tokens; give --tokens 1 8")
    other = "humming" if options.int4 else "cublas"
    print_machine()
    peak = bandwidth()
    print(f"bandwidth {peak / 1e12:.2f} TB/s\n")
    rows: list[list[str]] = []
    records = []
    for name in options.shapes:
        for num_rows, dim in SHAPES[name]:
            num_bytes = num_rows * dim * 2 if not options.int4 else num_rows * (dim // 2 + dim // GROUP * 2)
            floor, count = num_bytes / peak * 1e6, max(1, min(12, 2**30 // num_bytes))
            measured = partial(int4_case if options.int4 else plain_case, num_rows, dim, count)
            for num_tokens, launch, found in measured(options.tokens):
                ratio = found["lightkv"].median / found[other].median
                rows.append(
                    [
                        f"{name} {num_rows} x {dim}",
                        str(num_tokens),
                        f"{floor:.1f}",
                        found["lightkv"].text(".1f"),
                        found[other].text(".1f"),
                        f"{ratio:.2f}",
                    ]
                )
                records.append(
                    {
                        "model": name,
                        "rows": num_rows,
                        "columns": dim,
                        "tokens": num_tokens,
                        "floor_us": floor,
                        "launch": launch,
                        **{f"{side}_us": spread for side, spread in found.items()},
                    }
                )
    print_table(["weight", "tokens", "floor us", "lightkv us", f"{other} us", "ratio"], rows)
    print_json("int4_linear" if options.int4 else "linear", {"bandwidth": peak, "rows": records}, options.out)


if __name__ == "__main__":
    main()
