"""The names, defaults and rules of TensorRT-LLM's attention contract."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightkv.contracts import tensorrt_llm as contract
from lightkv.contracts.tensorrt_llm import (
    AttentionBackend,
    AttentionForwardArgs,
    AttentionMetadata,
    AttentionRuntimeFeatures,
    CacheType,
    KVCacheManager,
    KVCacheParams,
    PredefinedAttentionMask,
)
from lightkv.contracts.tensorrt_llm.arguments import HONOURED
from lightkv.contracts.tensorrt_llm.upstream import INTERFACE, subclassed, upstream_interface
from lightkv.errors import OutOfTokens

CONTRACT = json.loads((Path(__file__).parent / "tensorrt_llm.json").read_text(encoding="utf-8"))
CLASSES = [name for name in CONTRACT if name != "enums"]


def int_tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def make_manager(**changes: Any) -> KVCacheManager:
    settings: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_seq_len": 64,
        "max_batch_size": 8,
        "tokens_per_block": 8,
    }
    return KVCacheManager(**{**settings, **changes})


def make_metadata(seq_lens: list[int], cached: list[int], contexts: int, **changes: Any) -> AttentionMetadata:
    manager = make_manager()
    requests = list(range(len(seq_lens)))
    manager.add_dummy_requests(requests, [sum(both) for both in zip(seq_lens, cached, strict=True)])
    settings: dict[str, Any] = {
        "max_num_requests": 8,
        "max_num_tokens": 128,
        "kv_cache_manager": manager,
        "request_ids": requests,
        "seq_lens": int_tensor(*seq_lens),
        "num_contexts": contexts,
        "kv_cache_params": KVCacheParams(use_cache=True, num_cached_tokens_per_seq=cached),
    }
    return AttentionMetadata(**{**settings, **changes})


def parameters_of(function: Any) -> list[list[Any]]:
    kinds = {inspect.Parameter.VAR_KEYWORD: "**"}
    found = []
    for one in inspect.signature(function).parameters.values():
        name = kinds.get(one.kind, "") + one.name
        if one.name != "self":
            found.append([name] if one.default is one.empty else [name, one.default])
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_names_and_defaults_are_the_contracts(name: str) -> None:
    wanted, found = CONTRACT[name], getattr(contract, name)
    if dataclasses.is_dataclass(found):
        fields = {one.name: one for one in dataclasses.fields(found) if one.init}
        plain = {key: one.default for key, one in fields.items() if one.default is not dataclasses.MISSING}
        made = [key for key, one in fields.items() if one.default_factory is not dataclasses.MISSING]
        assert plain == wanted["defaults"]
        assert made == wanted["made"]
        assert [key for key in fields if key not in plain and key not in made] == wanted["required"]
    for one in wanted["properties"]:
        assert isinstance(inspect.getattr_static(found, one), property), one
    for method, parameters in wanted["methods"].items():
        assert parameters_of(getattr(found, method)) == parameters, method


def test_enumerations_are_the_contracts() -> None:
    for name, members in CONTRACT["enums"].items():
        assert {one.name: one.value for one in getattr(contract, name)} == members


def test_dataclasses_take_keywords_only() -> None:
    with pytest.raises(TypeError):
        AttentionMetadata(4, 8)  # type: ignore[misc]
    with pytest.raises(TypeError):
        AttentionForwardArgs(None)  # type: ignore[misc]
    assert AttentionBackend.Metadata is AttentionMetadata


def test_support_is_what_the_kernels_have() -> None:
    assert AttentionBackend.support_fused_qkv()
    assert not AttentionBackend.support_fused_rope()
    assert not AttentionBackend.support_mla()
    assert not AttentionBackend.support_multi_item_scoring()


def test_derived_numbers() -> None:
    metadata = make_metadata([5, 3, 1, 1], [0, 8, 4, 9], 2)
    assert (metadata.num_seqs, metadata.num_generations) == (4, 2)
    assert (metadata.num_ctx_tokens, metadata.num_tokens) == (8, 10)
    assert metadata.context_lens.tolist() == [5, 3]
    assert metadata.seq_lens_cuda.tolist() == [5, 3, 1, 1]
    assert metadata.seq_lens_cuda.dtype == torch.int32
    assert metadata.seq_lens_kv is metadata.seq_lens
    assert metadata.seq_lens_kv_cuda is metadata.seq_lens_cuda
    assert not metadata.is_cross
    metadata.num_contexts = 1
    assert (metadata.num_generations, metadata.num_ctx_tokens) == (3, 5)
    metadata.seq_lens_kv = int_tensor(5, 3, 1, 1)
    assert metadata.is_cross  # another tensor, even with the same numbers
    empty = AttentionMetadata(max_num_requests=1, max_num_tokens=1)
    assert (empty.num_generations, empty.num_tokens, empty.seq_lens_cuda) == (0, 0, None)


@pytest.mark.parametrize("wrong", [[1, 2], torch.ones(2), torch.ones(1, 2, dtype=torch.int32)])
def test_seq_lens_are_an_int_tensor(wrong: Any) -> None:
    metadata = make_metadata([1], [3], 0)
    with pytest.raises(ValueError, match="int tensor"):
        metadata.seq_lens = wrong
    assert metadata.seq_lens.tolist() == [1]


def test_a_batch_in_the_wrong_order_is_refused() -> None:
    with pytest.raises(ValueError, match="contexts before all generations"):
        make_metadata([1, 5], [9, 0], 1).prepare()  # a generation, then a context
    late = make_metadata([1, 1], [9, 0], 1, prompt_lens=[4, 5])
    with pytest.raises(ValueError, match="it is a generation"):
        late.prepare()
    drafts = AttentionRuntimeFeatures(has_speculative_draft_tokens=True)
    make_metadata([5, 3], [0, 9], 1, runtime_features=drafts).prepare()
    # Upstream's own tests give the tokens with this step's as prompt_lens.
    make_metadata([5, 1], [4, 9], 1, prompt_lens=[9, 10]).prepare()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_contexts": 3}, "num_contexts is 3"),
        ({"max_num_requests": 1}, "takes 1"),
        ({"max_num_tokens": 5}, "of 5"),
        ({"request_ids": [0]}, "request_ids"),
        ({"kv_cache_params": None}, "cached tokens of each"),
        ({"seq_lens": None}, "seq_lens is not set"),
        ({"seq_lens": int_tensor(5, 0)}, "at least one query"),
        ({"seq_lens": int_tensor(9, 1)}, "1 blocks of 8"),
    ],
)
def test_batches_that_break_the_rules(changes: dict[str, Any], words: str) -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    for name, value in changes.items():
        setattr(metadata, name, value)
    with pytest.raises(ValueError, match=words):
        metadata.prepare()


def run(metadata: AttentionMetadata, *args: Any, **kwargs: Any) -> torch.Tensor:
    num = metadata.num_tokens
    q, k, v = (torch.randn(num, heads * 16).half() for heads in (4, 2, 2))
    found: torch.Tensor = AttentionBackend(0, 4, 16, 2).forward(q, k, v, metadata, *args, **kwargs)
    return found


def test_forward_needs_prepare() -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    with pytest.raises(ValueError, match="prepare"):
        run(metadata)
    metadata.prepare()
    run(metadata)
    metadata.seq_lens = int_tensor(5, 1)
    with pytest.raises(ValueError, match="prepare"):
        run(metadata)


def test_keywords_or_an_object_but_not_both() -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    metadata.prepare()
    with pytest.raises(ValueError, match="unknown keywords \\['no_such'\\]"):
        run(metadata, no_such=1)
    with pytest.raises(ValueError, match="both forward_args and the keywords"):
        run(metadata, AttentionForwardArgs(), attention_window_size=4)
    with pytest.raises(ValueError, match="unknown"):
        run(metadata, AttentionForwardArgs(), no_such=1)
    with pytest.raises(ValueError, match="relative_attention_bias"):
        run(metadata, relative_attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="custom"):
        run(metadata, attention_mask="custom")
    with pytest.raises(ValueError, match="context_only"):
        run(metadata, attention_input_type=1)
    for mask in (PredefinedAttentionMask.FULL, "full"):
        assert run(metadata, AttentionForwardArgs(attention_mask=mask)).shape == (6, 64)
    assert run(metadata, forward_args=None).shape == (6, 64)


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        ((6, 60), (6, 32), (6, 32), "q must be"),
        ((5, 64), (6, 32), (6, 32), "q has 5 tokens"),
        ((6, 64), (5, 32), (5, 32), "k must be"),
        ((6, 64), (6, 32), None, "must hold K and V"),
        ((6, 64), None, (6, 32), "without k"),
        ((6, 64), None, None, "update_kv_cache=False"),
        ((6, 128), (6, 32), (6, 32), "q holds K and V already"),
    ],
)
def test_tensors_that_do_not_fit(q: Any, k: Any, v: Any, words: str) -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    metadata.prepare()
    buffer = metadata.kv_cache_manager.get_buffers(0).zero_()
    tensors = [None if shape is None else torch.ones(*shape).half() for shape in (q, k, v)]
    with pytest.raises(ValueError, match=words):
        AttentionBackend(0, 4, 16, 2).forward(*tensors, metadata)  # type: ignore[arg-type]
    assert not buffer.any()


def test_settings_that_the_layer_does_not_have() -> None:
    with pytest.raises(ValueError, match="pos_embd_params"):
        AttentionBackend(0, 4, 16, pos_embd_params=object())
    with pytest.raises(ValueError, match="sparse_params"):
        AttentionBackend(0, 4, 16, sparse_params=object())
    with pytest.raises(ValueError, match="evenly"):
        AttentionBackend(0, 4, 16, 3)
    layer = AttentionBackend(3, 4, 16, pos_embd_params=None, skip_create_weights_in_init=True)
    assert (layer.layer_idx, layer.num_heads, layer.head_dim, layer.num_kv_heads) == (3, 4, 16, 4)
    assert layer.quant_config is None
    layer.update_quant_config("new")
    assert layer.quant_config == "new"


def test_graph_metadata_never_moves() -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    static = metadata.create_cuda_graph_metadata(3, max_draft_tokens=3)
    assert static.is_cuda_graph
    assert not metadata.is_cuda_graph
    assert static.num_contexts == 0
    assert static.seq_lens.tolist() == [4, 4, 4]
    assert static.create_cuda_graph_metadata(3) is static
    held = static.seq_lens_cuda
    pointer = held.data_ptr()
    static.seq_lens = int_tensor(1, 4, 2)
    assert static.seq_lens_cuda is held
    assert held.data_ptr() == pointer
    assert held.tolist() == [1, 4, 2]
    with pytest.raises(ValueError, match="fill the batch up"):
        static.seq_lens = int_tensor(1)  # would be spread over the three
    assert held.tolist() == [1, 4, 2]
    assert metadata.seq_lens_cuda.tolist() == [5, 1]
    with pytest.raises(ValueError, match="0 sequences"):
        metadata.create_cuda_graph_metadata(0)


def test_no_tensor_of_a_graph_moves_in_prepare() -> None:
    manager = make_manager()
    manager.add_dummy_requests([0, 1], [20, 20])
    metadata = AttentionMetadata(
        max_num_requests=2, max_num_tokens=16, kv_cache_manager=manager, request_ids=[0, 1]
    )
    for drafts in (0, 3):
        static = metadata.create_cuda_graph_metadata(2, max_draft_tokens=drafts)
        names = ("rows", "lengths", "q_starts", "kv_starts", "token_rows", "token_positions", "blocks")
        seen = []
        for first, cached in ((1 + drafts, [3, 9]), (1, [15, 2])):
            static.seq_lens = int_tensor(first, 1)
            static.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=cached)
            static.prepare()
            tensors = {name: getattr(static.step, name) for name in names}
            seen.append({name: (one.data_ptr(), one.shape) for name, one in tensors.items()})
            assert static.step.lengths.tolist() == [cached[0] + first, cached[1] + 1]
        assert seen[0] == seen[1]
        static.seq_lens = int_tensor(2 + drafts, 1 + drafts)
        with pytest.raises(ValueError, match="the CUDA graph is of 2"):
            static.prepare()


def test_cross_metadata() -> None:
    decoder = make_metadata([3, 1], [0, 4], 1)
    with pytest.raises(RuntimeError, match="no metadata of cross"):
        decoder.update_cross_metadata([4, 0], None)
    cross = decoder.create_cross_metadata([7, 0], make_manager(), [0, 5])
    assert cross.is_cross
    assert cross.cross is cross
    assert decoder.cross is None
    assert not decoder.is_cross
    assert cross.seq_lens is decoder.seq_lens
    assert cross.seq_lens_cuda is decoder.seq_lens_cuda
    assert (cross.num_tokens, cross.num_contexts, cross.request_ids) == (7, 1, [0, 1])
    assert cross.kv_cache_params.num_cached_tokens_per_seq == [0, 5]
    decoder.cross = cross
    assert decoder.has_cross_sub_metadata
    decoder.seq_lens = int_tensor(1, 1)
    assert cross.seq_lens is decoder.seq_lens  # the setter hands it on
    decoder.num_contexts = 0
    same = decoder.update_cross_metadata([0, 0], cross.kv_cache_manager, [7, 5])
    assert same is cross
    assert cross.seq_lens_kv.tolist() == [0, 0]
    assert cross.num_contexts == 0

    static = decoder.create_cuda_graph_metadata(2)
    assert static.cross is not cross
    assert static.cross.is_cross
    held = static.cross.seq_lens_kv_cuda
    static.seq_lens = int_tensor(1, 1)
    assert static.cross.seq_lens_cuda is static.seq_lens_cuda
    static.update_cross_metadata([0, 0], cross.kv_cache_manager, [7, 5])
    assert static.cross.seq_lens_kv_cuda is held
    static.update_cross_metadata([4, 0], cross.kv_cache_manager, [0, 5])
    with pytest.raises(ValueError, match="eager step"):
        static.cross.prepare()
    numbers: dict[str, Any] = {"max_num_requests": 2, "max_num_tokens": 4, "seq_lens": int_tensor(1, 1)}
    with pytest.raises(ValueError, match="create_cross_metadata"):
        AttentionMetadata(**numbers, cross=object())
    with pytest.raises(ValueError, match="no cross metadata of its own"):
        AttentionMetadata(**numbers, seq_lens_kv=int_tensor(1, 1), cross=cross)


def test_manager_counts_blocks() -> None:
    manager = make_manager(num_blocks=6, max_batch_size=3)
    assert manager.get_buffers(0).shape == (7, 2, 2, 8, 16)
    assert manager.get_buffers(0, "NHD").shape == (7, 2, 8, 2, 16)
    assert manager.get_buffers(0, "NHD").data_ptr() == manager.get_buffers(0).data_ptr()
    manager.add_dummy_requests([5, 9], [9, 8])
    assert [len(one) for one in manager.get_batch_cache_indices([9, 5])] == [1, 2]
    assert manager.get_num_free_blocks() == 3
    with pytest.raises(OutOfTokens):
        manager.add_sequence(1, 32)
    with pytest.raises(ValueError, match="are open"):
        manager.add_sequence(9, 1)
    with pytest.raises(ValueError, match="65 tokens"):
        manager.add_sequence(1, 65)
    assert manager.get_num_free_blocks() == 3
    manager.resize(9, 20)
    manager.resize(9, 3)
    blocks = manager.get_batch_cache_indices([5, 9])
    assert sorted(blocks[0] + blocks[1]) == [1, 2, 3, 4, 5]
    table, counts = manager.block_table([9, 5])
    assert counts == [3, 2]
    assert table[0].tolist() == blocks[1]
    assert table[1, :2].tolist() == blocks[0]
    manager.free_resources(5)
    with pytest.raises(KeyError):
        manager.get_batch_cache_indices([5])
    manager.shutdown()
    assert manager.get_num_free_blocks() == manager.blocks_in_primary_pool == 6
    manager.cache.check()


def test_kinds_of_cache() -> None:
    each = make_manager(tokens_per_block=None, cache_type=CacheType.PER_TOKEN)
    whole = make_manager(tokens_per_block=None, cache_type=CacheType.LINEAR)
    for manager, blocks in ((each, 5), (whole, 1)):
        manager.add_sequence(0, 5)
        assert [len(one) for one in manager.get_batch_cache_indices([0])] == [blocks]
    assert (each.tokens_per_block, whole.tokens_per_block) == (1, 64)
    with pytest.raises(ValueError, match="PER_TOKEN"):
        make_manager(tokens_per_block=8, cache_type=CacheType.PER_TOKEN)
    with pytest.raises(ValueError, match="needs tokens_per_block"):
        make_manager(tokens_per_block=None)
    with pytest.raises(ValueError, match="kv_layout"):
        make_manager(kv_layout="DHN")


@dataclasses.dataclass
class FakePrediction:
    """Stands for TensorRT-LLM's SparsePrediction."""

    indices: torch.Tensor | None = None
    block_size: int = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class FakeForwardArgs(AttentionForwardArgs):
    """Stands for TensorRT-LLM's own arguments: two are objects, and one is newer than lightkv."""

    sparse_prediction: Any = dataclasses.field(default_factory=FakePrediction)
    skip_softmax_kernel_params: Any = dataclasses.field(default_factory=FakePrediction)
    of_tomorrow: float = 0.5


NOT_HONOURED = sorted({one.name for one in dataclasses.fields(FakeForwardArgs)} - HONOURED)


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_arguments_that_are_not_carried_out_are_refused_by_name(name: str) -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    metadata.prepare()
    buffer = metadata.kv_cache_manager.get_buffers(0).zero_()
    values = [torch.zeros(1), 7, True]
    if "sparse" in name or "softmax" in name:
        values += [FakePrediction(block_size=4), FakePrediction(torch.zeros(2))]
    for value in values:
        forms = [{"forward_args": FakeForwardArgs(**{name: value})}]
        if name != "of_tomorrow":
            forms += [{name: value}, {"forward_args": AttentionForwardArgs(**{name: value})}]
        for form in forms:
            if name == "chunked_prefill_buffer_batch_size" and value is True:
                continue  # it is 1
            with pytest.raises(ValueError, match=f"{name} is given"):
                run(metadata, **form)
    assert not buffer.any()
    assert run(metadata, FakeForwardArgs()).shape == (6, 64)


NOT_READ: dict[str, Any] = {
    "cu_q_seqlens": torch.zeros(1),
    "cu_kv_seqlens": torch.zeros(1),
    "multi_item_part_lens": [[1]],
    "draft_kv_cache_manager": object(),
    "sparse_metadata_params": object(),
    "mamba_metadata": object(),
    "enable_flash_mla": True,
    "enable_context_mla_with_cached_kv": True,
    "host_max_attention_window_sizes": torch.zeros(1),
    "host_sink_token_length": torch.zeros(1),
    "num_extra_kv_tokens": 2,
}


@pytest.mark.parametrize("name", NOT_READ)
def test_fields_that_are_not_read_are_refused_by_name(name: str) -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    metadata.prepare()
    holder = metadata if hasattr(metadata, name) else metadata.kv_cache_params
    old = getattr(holder, name)
    setattr(holder, name, NOT_READ[name])
    with pytest.raises(ValueError, match=f"{name} is .*does not read it"):
        metadata.prepare()
    run(metadata)  # the batch before it is still there
    setattr(holder, name, False if name == "mamba_metadata" else old)
    metadata.prepare()


@pytest.mark.parametrize(
    "name",
    [
        "prepare_for_spec_dec",
        "restore_from_spec_dec",
        "update_spec_dec_param",
        "update_for_spec_dec",
        "on_update_kv_lens",
        "update_helix_param",
    ],
)
def test_steps_that_are_not_carried_out_say_so(name: str) -> None:
    metadata = make_metadata([5, 1], [0, 9], 1)
    metadata.prepare()
    with pytest.raises(NotImplementedError, match=f"{name} is TensorRT-LLM's, and .* no such step: .*"):
        getattr(metadata, name)("_seq_lens", of_any=1)
    run(metadata)


def test_an_encoders_batch_is_prepared_as_any() -> None:
    metadata = make_metadata([5, 3], [0, 0], 2)
    metadata.prepare_encoder_only()
    assert metadata.step.lengths.tolist() == [5, 3]


class FakeMetadata:
    """Stands for TensorRT-LLM's own."""

    seq_lens = "theirs"
    of_theirs = 3

    def only_theirs(self) -> str:
        return "a method that works on their fields"

    def prepare_for_spec_dec(self, *fields: str) -> None:
        for field in fields:
            setattr(self, field, getattr(self, field).clone())

    @staticmethod
    def get_empty(size: int) -> list[int]:
        return [0] * size


class FakeBackend:
    """Stands for TensorRT-LLM's own."""

    def of_theirs(self) -> None:
        """A method that only they have."""

    @classmethod
    def support_tomorrow(cls) -> bool:
        return False


def test_classes_are_tensorrt_llms_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert upstream_interface() is None
    assert subclassed(AttentionMetadata, None) is AttentionMetadata
    for name in ("tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.attention_backend", INTERFACE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface = sys.modules[INTERFACE]
    monkeypatch.setattr(interface, "AttentionMetadata", FakeMetadata, raising=False)
    monkeypatch.setattr(interface, "AttentionBackend", FakeBackend, raising=False)
    assert upstream_interface() is interface
    metadata_class = subclassed(AttentionMetadata, interface)
    backend_class: Any = subclassed(AttentionBackend, interface, Metadata=metadata_class)
    assert issubclass(backend_class, FakeBackend)
    assert backend_class.Metadata is metadata_class
    metadata = metadata_class(max_num_requests=2, max_num_tokens=4, seq_lens=int_tensor(1, 1))
    assert isinstance(metadata, FakeMetadata)
    assert (metadata.of_theirs, metadata.get_empty(2)) == (3, [0, 0])
    for step, remedy in (("only_theirs", "own backend"), ("prepare_for_spec_dec", "Verify drafts")):
        with pytest.raises(NotImplementedError, match=f"{step} is TensorRT-LLM's.*{remedy}"):
            getattr(metadata, step)()
    assert metadata.seq_lens.tolist() == [1, 1]
    assert type(metadata.create_cuda_graph_metadata(2)) is metadata_class
    metadata.prepare()
    q = torch.randn(2, 64, device=metadata.device).half()
    assert not backend_class.support_tomorrow()
    with pytest.raises(NotImplementedError, match="of_theirs is TensorRT-LLM's"):
        backend_class(0, 4, 16, 2).of_theirs()
    assert backend_class(0, 4, 16, 2).forward(q, q[:, :32], q[:, 32:], metadata).shape == (2, 64)


def test_a_broken_installation_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    assert upstream_interface() is None
    assert "cannot be imported" in caplog.text


def test_importing_the_contract_loads_no_kernel_of_another_project() -> None:
    program = (
        "import sys, lightkv.contracts.tensorrt_llm as c; "
        "assert 'tensorrt_llm' not in sys.modules; print(c.AttentionBackend.__mro__[1].__name__)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "object", done.stderr
