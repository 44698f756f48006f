"""Compares the products of few tokens with cuBLAS on the weights of a model's layers.

    python -m bench.kernels.linear --out bench/results/linear-h200.json

Every weight of a shape is another tensor, so none is found in the cache. A row's floor is the bytes of its
weight over the bandwidth that a reduction reaches in this run. The sides run alternately, each as a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.layers.linear import linear, linear_launch, tickets_for

# Rows and columns of the weights: joined q, k and v; attention's output; joined gate and up; down; the head.
SHAPES = {
    "llama-3-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "llama-3.2-3b": [(5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192), (128256, 3072)],
    "llama-3-70b": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
    "qwen3-moe": [(5120, 2048), (2048, 4096), (151936, 2048)],
}
ROUNDS = 5
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
    num_rows, dim = weights[0].shape
    x = torch.randn(num_tokens, dim, device="cuda").bfloat16()
    tickets = tickets_for(weights[0])
    wanted = functional.linear(x.float(), weights[0].float())
    error = float((linear(x, weights[0], None, tickets).float() - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        refuse(f"{num_tokens} tokens times {num_rows} x {dim} are off by {error}")
    repeats = max(1, 16 // len(weights))
    used = weights * repeats
    graphs = {
        "lightkv": capture(lambda: [linear(x, weight, None, tickets) for weight in used]),
        "cublas": capture(lambda: [functional.linear(x, weight) for weight in used]),
    }
    sides = {name: lambda graph=graph: replay_us(graph, len(used)) for name, graph in graphs.items()}
    found = list(alternate(ROUNDS, sides))
    return {name: Spread.of([times[name] for times in found]) for name in sides}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 8, 16, 32, 48, 64])
    options = arguments.parse_args()
    print_machine()
    peak = bandwidth()
    print(f"bandwidth {peak / 1e12:.2f} TB/s\n")
    rows: list[list[str]] = []
    records = []
    for name in options.shapes:
        for num_rows, dim in SHAPES[name]:
            floor = num_rows * dim * 2 / peak * 1e6
            count = max(1, min(12, 2**30 // (num_rows * dim * 2)))
            weights = [
                (torch.randn(num_rows, dim, device="cuda") * dim**-0.5).bfloat16() for _ in range(count)
            ]
            device = tuning.device_class(weights[0].device)
            for num_tokens in options.tokens:
                found = measure(num_tokens, weights)
                launch = linear_launch(device, num_tokens, num_rows, dim, 2)
                ratio = found["lightkv"].median / found["cublas"].median
                rows.append(
                    [
                        f"{name} {num_rows} x {dim}",
                        str(num_tokens),
                        f"{floor:.1f}",
                        found["lightkv"].text(".1f"),
                        found["cublas"].text(".1f"),
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
    print_table(["weight", "tokens", "floor us", "lightkv us", "cuBLAS us", "ratio"], rows)
    print_json("linear", {"bandwidth": peak, "rows": records}, options.out)


if __name__ == "__main__":
    main()
