"""The memory that steps need beside weights and pool: what attention needs is counted, and graphs share it."""

import weakref
from typing import Any

import pytest
import torch

from lightkv.attention import LayerShape
from lightkv.integrations.model.probe import probe
from lightkv.router import EngineConfig
from lightkv.router.model import sizes as sizes_module
from lightkv.router.model.build import assemble
from lightkv.router.model.cuda_graph import PromptGraph, SharedLogits
from lightkv.router.model.sizes import EngineSizes
from lightkv.router.model.token_buckets import prompt_shapes
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import HeadShape
from lightkv.triton_kernels.attention.prefill import prefill_attention as prefill_module
from lightkv.triton_kernels.attention.prefill.prefill_combine import empty_partials, most_partial_bytes
from tests.support.tiny_models import tiny_llama

CPU = torch.device("cpu")


def needed(backend: str) -> int:
    """Returns the bytes that the steps of a small engine need with this backend."""
    model = tiny_llama(CPU, context=160)
    config = EngineConfig(device="cpu", attention_backend=backend, max_num_seqs=4, prefill_chunk=40)
    return EngineSizes(config, CPU, model.config.get_text_config()).step_bytes(probe(model))


def test_the_partial_outputs_of_prefill_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = probe(tiny_llama(CPU, context=160))
    layer: LayerShape = shape.layers[0]
    heads = HeadShape(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_dim or layer.head_dim)
    parts = most_partial_bytes(tuning.device_class(CPU), heads, 44, shape.spec.dtype.itemsize)
    assert parts > 0
    assert needed("triton") - needed("torch") == parts
    # Graphs have memory of their own, and eager steps do not use it.
    monkeypatch.setattr(sizes_module, "use_graphs", lambda *_: True)
    assert needed("triton") - needed("torch") == 2 * parts


@pytest.mark.parametrize(
    ("device", "target", "chunk"),
    [("cuda", 0.0, 8192), ("cuda", None, 4096), ("cpu", 0.0, 2048), ("cpu", None, 512)],
)
def test_steps_have_more_prompt_tokens_where_nobody_waits_between_tokens(
    device: str, target: float | None, chunk: int
) -> None:
    text = tiny_llama(CPU, context=160).config.get_text_config()
    sizes = EngineSizes(EngineConfig(itl_target=target), torch.device(device), text)
    assert sizes.limits.prefill_chunk == chunk


def test_what_graphs_keep_holds_no_partial_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's parts are free when its attention has been launched. So the graphs, which have one memory
    pool, use the same memory, and no set of parts belongs to a graph or to its step."""
    made: list[weakref.ref[torch.Tensor]] = []

    def noted(*sizes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(part() is None for part in made)
        parts = empty_partials(*sizes)
        made.extend(map(weakref.ref, parts))
        return parts

    monkeypatch.setattr(prefill_module, "empty_partials", noted)
    config = EngineConfig(
        device="cpu", attention_backend="triton", max_num_seqs=3, prefill_chunk=20, max_total_tokens=200
    )
    runner, _ = assemble(tiny_llama(CPU, context=160), config, lambda line: None)
    graphs = [
        PromptGraph(runner._parts, shapes[0], runner.limits, SharedLogits(3))
        for shapes in prompt_shapes([8, 12], 3).values()
    ]
    for graph in graphs:
        graph.rehearse()
    assert len(made) == len(graphs) * 2 * 2 == 8  # outputs and log-sum-exps of two layers
    assert all(part() is None for part in made)
    assert all(graph._inputs.step.plans._made for graph in graphs)
