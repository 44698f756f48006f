"""TensorRT-LLM's attention of one layer, over lightkv's kernels; on a CPU, over their references."""

import math
from typing import Any, ClassVar

import torch

from lightkv.attention.backend import LayerShape
from lightkv.triton_kernels.attention.lookups import CONTIGUOUS
from lightkv.triton_kernels.attention.mixed_attention import (
    mixed_attention,
    mixed_attention_reference,
    mixed_plan,
)
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.variants import Chunk, SinkLogits, Window
from lightkv.triton_kernels.attention.variants.variant import limits
from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.write.inputs import NO_BIASES, Biases, Changes, StoredKV
from lightkv.triton_kernels.write.write_kv import split_qkv, write_kv, write_kv_reference

from .arguments import AttentionInputType, PredefinedAttentionMask, merge_attention_forward_args
from .metadata import AttentionMetadata
from .page_views import PageTable, PageViews
from .step import Step

_BIAS = Tensors(qkv_bias="contiguous floats [n]")
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
# What TensorRT-LLM's models give every backend, and says nothing about attention here.
_NO_MEANING = frozenset({"skip_create_weights_in_init", "dtype", "aux_stream"})


class AttentionBackend:
    """Attention of one layer: writes a step's K and V to the cache, and attends to all that it holds.

    It keeps the blocks of a cache manager as they are, and gives the kernels views of them (`PageViews`). It
    works eagerly and in a CUDA graph, which has to be captured on metadata of `create_cuda_graph_metadata`.
    """

    Metadata: ClassVar[type] = AttentionMetadata
    # Whether kernels run on a CPU, too, by Triton's interpreter; tests do so.
    kernels_on_cpu: ClassVar[bool] = False

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        quant_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Makes the attention of layer `layer_idx`, with `num_heads` query heads of `head_dim` dims that share
        `num_kv_heads` K/V heads (None: as many).

        `quant_config`: TensorRT-LLM's, of which `layer_quant_mode` is compared with the cache's type. Of its
        other keywords these are known: `q_scaling` (scores are divided by it, too), `attention_chunk_size` (a
        query sees the tokens of its chunk), `qkv_bias`, and `pos_embd_params`, which has to be None, because
        the model applies positions before. Raises ValueError for others that are set, and for heads that do not
        fit.
        """
        shape = LayerShape(num_heads, head_dim, num_kv_heads or num_heads)
        q_scaling, chunk = kwargs.pop("q_scaling", None), kwargs.pop("attention_chunk_size", None)
        positions, qkv_bias = kwargs.pop("pos_embd_params", None), kwargs.pop("qkv_bias", None)
        unknown = sorted(name for name, value in kwargs.items() if value and name not in _NO_MEANING)
        if positions is not None or unknown:
            raise ValueError(
                f"pos_embd_params is {positions!r} and {unknown} are set: rotate q and k in the model "
                "(support_fused_rope is False), and leave out what lightkv's attention does not know"
            )
        if q_scaling is not None and not (math.isfinite(q_scaling) and q_scaling > 0):
            raise ValueError(f"q_scaling is {q_scaling}; it divides the scores, so it must be above 0")
        self.layer_idx = layer_idx
        self.num_heads = shape.num_heads
        self.head_dim = shape.head_dim
        self.num_kv_heads = shape.num_kv_heads
        self.quant_config = quant_config
        self._scale = head_dim**-0.5 / (1.0 if q_scaling is None else q_scaling)
        self._chunk = chunk or 0
        self.qkv_bias = qkv_bias

    @property
    def qkv_bias(self) -> torch.Tensor | None:
        """The bias of the projection to q, K and V, in this order: floats `[(num_heads + 2 * num_kv_heads) *
        head_dim]` on the cache's device, which are added to q, and to this step's K and V before they are
        stored. None for a projection that has none, or adds it itself, as it must where the model rotates q and
        k. Setting it raises ValueError for another shape or type.

        A captured graph reads the tensor that was set when it was captured."""
        return self._qkv_bias

    @qkv_bias.setter
    def qkv_bias(self, bias: torch.Tensor | None) -> None:
        made = NO_BIASES
        if bias is not None:
            num_heads, num_kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
            _BIAS.check({"n": (num_heads + 2 * num_kv_heads) * head_dim}, qkv_bias=bias)
            made = Biases(*split_qkv(bias.detach(), num_heads, num_kv_heads, head_dim))
        self._qkv_bias, self._biases = bias, made

    @classmethod
    def support_fused_rope(cls) -> bool:
        """Whether q and k are rotated here: no, the model does it."""
        return False

    @classmethod
    def support_fused_qkv(cls) -> bool:
        """Whether q may hold K and V, too: yes."""
        return True

    @classmethod
    def support_mla(cls) -> bool:
        """Whether latent K/V is attended to: no."""
        return False

    @classmethod
    def support_multi_item_scoring(cls) -> bool:
        """Whether several items of a prompt are scored at once: no."""
        return False

    def update_quant_config(self, new_quant_config: Any) -> None:
        """Replaces the quantisation that the layer expects of the cache."""
        self.quant_config = new_quant_config

    def create_output(self, q: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
        """Makes what `forward` can write to: one tensor `[len(q), num_heads * head_dim]` of q's type, or
        float8_e4m3fn if `out_scale` is among the keywords, which are those of `forward`."""
        args = merge_attention_forward_args(None, kwargs)
        dtype = q.dtype if args.out_scale is None else FP8
        return [q.new_empty(len(q), self.num_heads * self.head_dim, dtype=dtype)]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
        forward_args: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Writes K and V of this step to the cache, then attends from q.

        Args:
            q: `[num_q_tokens, num_heads * head_dim]`, or with K and V behind it, `[num_tokens, (num_heads + 2 *
                num_kv_heads) * head_dim]`; 16 bits or float32, on the cache's device.
            k: `[num_kv_tokens, num_kv_heads * head_dim]`, or with V behind it, `[num_kv_tokens, 2 *
                num_kv_heads * head_dim]`. None if q holds it, or if there is no new key.
            v: `[num_kv_tokens, num_kv_heads * head_dim]`; None if q or k holds it, or if there is no new key.
            metadata: the batch's, prepared.
            forward_args: the optional arguments, an `AttentionForwardArgs`; or they are given as keywords.

        Returns:
            `[num_q_tokens, num_heads * head_dim]` of q's type, or float8_e4m3fn where that was asked for;
            `output` itself where it was given. Rows of q beyond the batch's tokens are padding, and get zeros.

        Raises:
            ValueError: an unknown keyword, or both forms of arguments; tensors that fit neither the layer nor
                the batch; metadata that was not prepared; a feature that lightkv's kernels do not have. Nothing
                is written then.
        """
        args = merge_attention_forward_args(forward_args, kwargs)
        step, numbers = metadata.step, metadata.step.numbers
        self._check_phase(args, metadata)
        q, keys, values = self._split(q, k, v, args, metadata)
        options = self._options(args, metadata)
        out_shape = len(q), self.num_heads * self.head_dim
        output: torch.Tensor | None = args.output
        wanted = (FP8,) if args.out_scale is not None else (q.dtype, FP8)
        if output is not None and (
            output.shape != out_shape or output.dtype not in wanted or output.device != q.device
        ):
            raise ValueError(
                f"output must be {out_shape} of {' or '.join(map(str, wanted))} on {q.device}, got "
                f"{output.dtype} {tuple(output.shape)} on {output.device}"
            )

        num_tokens = len(q) if step.is_padded else numbers.num_queries
        heads = q[:num_tokens].unflatten(1, (self.num_heads, self.head_dim))
        if self._biases.q is not None and self._biases.q.device != q.device:
            bias_device = self._biases.q.device
            raise ValueError(f"qkv_bias is on {bias_device}, and q on {q.device}; move it there")
        heads = _biased(heads, self._biases.q)
        is_direct = output is not None and output.dtype == q.dtype and output.is_contiguous()
        found = output if is_direct and output is not None else q.new_empty(out_shape)
        out = found.view(len(q), self.num_heads, self.head_dim)
        kv = self._keys(keys, values, metadata, args)
        if step.is_padded or num_tokens < len(q):
            out.zero_()
        if num_tokens:
            self._attend(heads, kv, options, metadata, out[:num_tokens])
        if is_direct:
            return found
        if args.out_scale is not None or (output is not None and output.dtype == FP8):
            found = _to_fp8(found, args.out_scale)
        return found if output is None else output.copy_(found)

    def _check_phase(self, args: Any, metadata: AttentionMetadata) -> None:
        kind = AttentionInputType(int(args.attention_input_type))
        contexts, generations = metadata.num_contexts, metadata.num_generations
        missing = {AttentionInputType.context_only: generations, AttentionInputType.generation_only: contexts}
        if missing.get(kind, 0):
            raise ValueError(
                f"attention_input_type is {kind.name} in a batch of {contexts} contexts and {generations} "
                "generations: give the whole batch's tokens in one call, as mixed"
            )

    def _split(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        args: Any,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns q `[num_q_tokens, num_heads * head_dim]`, and this step's K and V, `[num_kv_tokens,
        num_kv_heads, head_dim]`, or None for both. Raises ValueError."""
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        numbers = metadata.step.numbers
        if args.cross_kv is not None:
            if k is not None or not metadata.is_cross:
                raise ValueError(
                    "cross_kv holds K and V of cross attention: give no k beside it (given: "
                    f"{k is not None}), and metadata of create_cross_metadata (is_cross: {metadata.is_cross})"
                )
            k = args.cross_kv
        is_fused = q.dim() == 2 and q.shape[1] == q_width + 2 * kv_width
        if is_fused and (k is not None or v is not None or metadata.is_cross):
            raise ValueError("q holds K and V already: give no k, v and cross_kv, and no cross metadata")
        if q.dim() != 2 or (q.shape[1] != q_width and not is_fused) or (args.is_fused_qkv and not is_fused):
            raise ValueError(
                f"q must be [tokens, {q_width}], or [tokens, {q_width + 2 * kv_width}] with K and V behind it; "
                f"got {tuple(q.shape)} with is_fused_qkv {args.is_fused_qkv}"
            )
        if not q.is_floating_point() or q.element_size() < 2:
            raise ValueError(f"q must be of 16 bits or float32, got {q.dtype}")
        num_queries, padded = numbers.num_queries, metadata.padded_num_tokens
        if len(q) < num_queries or (len(q) > num_queries and not metadata.is_cuda_graph and len(q) != padded):
            raise ValueError(
                f"q has {len(q)} tokens, and the batch {num_queries}, or {padded} padded (padded_num_tokens)"
            )
        if is_fused:
            q, k, v = q.split([q_width, kv_width, kv_width], dim=1)
        elif k is not None and v is None:
            if k.dim() != 2 or k.shape[1] != 2 * kv_width:
                raise ValueError(
                    f"without v, k must hold K and V, [tokens, {2 * kv_width}]; got {tuple(k.shape)}"
                )
            k, v = k.split([kv_width, kv_width], dim=1)
        if k is None or v is None:
            if v is not None:
                raise ValueError("v is given without k; give both, or neither")
            if args.update_kv_cache and numbers.num_keys:
                raise ValueError(
                    f"the batch has {numbers.num_keys} new keys, and neither q nor k holds them; if the cache "
                    "does already, as another layer's, say update_kv_cache=False"
                )
            return q, None, None
        num_keys = numbers.num_keys
        for name, heads in (("k", k), ("v", v)):
            if heads.shape[1:] != (kv_width,) or len(heads) < num_keys or len(heads) != len(k):
                raise ValueError(
                    f"{name} must be [{num_keys}, {kv_width}], the new keys of the batch; got "
                    f"{tuple(heads.shape)}"
                )
        if not metadata.step.is_padded:  # a padded graph's later batches may have more of the rows
            k, v = k[:num_keys], v[:num_keys]
        k, v = (heads.unflatten(1, (self.num_kv_heads, self.head_dim)) for heads in (k, v))
        return q, k, v

    def _options(self, args: Any, metadata: AttentionMetadata) -> AttentionOptions:
        if args.attention_mask not in (PredefinedAttentionMask.CAUSAL, PredefinedAttentionMask.FULL):
            raise ValueError(f"attention_mask is {args.attention_mask!r}; give CAUSAL or FULL")
        window, sinks = args.attention_window_size or 0, args.attention_sinks
        if window < 0 or (window and self._chunk) or (metadata.is_cross and (window or self._chunk)):
            raise ValueError(
                f"attention_window_size is {window} in a layer with chunks of {self._chunk}, cross attention "
                f"{metadata.is_cross}: a window is above 0, and is neither for cross attention nor for chunks"
            )
        if sinks is not None:
            if sinks.shape != (self.num_heads,):
                raise ValueError(f"attention_sinks must be [{self.num_heads}], got {tuple(sinks.shape)}")
            sinks = sinks.float().contiguous()
        is_causal = args.attention_mask == PredefinedAttentionMask.CAUSAL and not metadata.is_cross
        if self._chunk and not is_causal:
            raise ValueError(f"a layer with chunks of {self._chunk} tokens is causal; the mask is FULL")
        return AttentionOptions(self._scale, is_causal).plus(
            Window(window) if window else None,
            Chunk(self._chunk) if self._chunk else None,
            None if sinks is None else SinkLogits(sinks),
        )

    def _views(self, metadata: AttentionMetadata, device: torch.device) -> PageViews:
        buffer, layout = metadata.buffers(self.layer_idx)
        if buffer.device != device:
            raise ValueError(f"the cache is on {buffer.device}, and q on {device}; bring them together")
        mode = getattr(self.quant_config, "layer_quant_mode", None)
        for name, dtype in (("has_fp8_kv_cache", FP8), ("has_int8_kv_cache", torch.int8)):
            if mode is not None and getattr(mode, name, bool)() and buffer.dtype != dtype:
                raise ValueError(
                    f"quant_config says {name}, and the cache is of {buffer.dtype}; make it {dtype}"
                )
        return PageViews.of(buffer, self.num_kv_heads, self.head_dim, layout)

    def _keys(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
        args: Any,
    ) -> PagedKV:
        """Writes this step's K and V, unless that is not to be, and returns all keys that the batch sees."""
        step = metadata.step
        if not metadata.uses_cache:
            if k is None or v is None:
                k = v = torch.empty(1, self.num_kv_heads, self.head_dim, device=step.rows.device)
                if step.numbers.num_keys:
                    raise ValueError(
                        f"the batch has {step.numbers.num_keys} keys, no cache holds them, and no k is given"
                    )
            k, v = _biased(k, self._biases.k), _biased(v, self._biases.v)
            return PagedKV(k, v, step.kv_starts, lookup=CONTIGUOUS)
        views = self._views(metadata, step.rows.device)
        key = "pages", views.page_size, views.slots_per_block
        table = metadata.plans.get(key, self.layer_idx, lambda: views.table(step))
        written, read = self._scales(views, metadata, args)
        kv = views.paged_kv(table, read)
        if k is None or v is None:
            return kv
        if not args.update_kv_cache:
            raise ValueError(
                "k and v with update_kv_cache=False: keys are attended to in the cache alone; give None for "
                "both if it holds them, or use metadata without a cache"
            )
        self._write(k, v, views, table, written, step)
        return kv

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        views: PageViews,
        table: PageTable,
        scales: torch.Tensor | None,
        step: Step,
    ) -> None:
        """Writes this step's K and V with their biases to the slots of `table`, divided by `scales` where the
        cache is quantised."""
        slots = table.slots
        if step.sources is not None:
            sources, slots = step.sources[: len(k)], slots[: len(k)]
            k, v = k.index_select(0, sources), v.index_select(0, sources)
        write = write_kv if self._runs_kernels(k) else write_kv_reference
        stored = StoredKV(views.k, views.v, scales, views.format)
        write(k, v, stored, slots, by=Changes(biases=self._biases._replace(q=None)))

    def _scales(
        self, views: PageViews, metadata: AttentionMetadata, args: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the scales by which K and V are divided when they are written, and multiplied when they are
        read; None for both if the cache is not of 8 bits."""
        to_stored, to_original = args.kv_scale_orig_quant, args.kv_scale_quant_orig
        for name, scale in (("kv_scale_orig_quant", to_stored), ("kv_scale_quant_orig", to_original)):
            if scale is not None and (scale.numel() != 1 or not views.format.is_quantised):
                raise ValueError(
                    f"{name} has {scale.numel()} numbers, and the cache is of {views.k.dtype}: one number is "
                    "for all of a layer's K and V, in a cache of float8_e4m3fn or int8"
                )
        if not views.format.is_quantised:
            return None, None
        if to_stored is None and to_original is None:
            of_manager = getattr(metadata.kv_cache_manager, "kv_scale", None)
            scale = torch.ones(1, device=views.k.device) if of_manager is None else of_manager(self.layer_idx)
            both = views.scales(scale)
            return both, both
        write = to_original if to_stored is None else to_stored.float().reciprocal()
        read = to_stored.float().reciprocal() if to_original is None else to_original
        return views.scales(write), views.scales(read)

    def _runs_kernels(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda or self.kernels_on_cpu

    def _attend(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        options: AttentionOptions,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Writes the attention of q `[T, num_heads, head_dim]` to `out`, of the same shape."""
        step = metadata.step
        if not self._runs_kernels(q):
            out.copy_(mixed_attention_reference(q, kv, step.rows, step.q_starts, step.lengths, options))
            return
        heads = HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)
        plan = metadata.plans.get(
            (*heads, options.causal, limits(options.variants), q.dtype, len(q), kv.format),
            self.layer_idx,
            lambda: mixed_plan(
                step.rows,
                step.q_starts,
                step.lengths,
                heads,
                num_tokens=len(q),
                dtype=q.dtype,
                options=options,
                layer_format=kv.format,
            ),
        )
        mixed_attention(q, kv, step.rows, step.q_starts, step.lengths, options, plan=plan, out=out)


def _to_fp8(out: torch.Tensor, out_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns attention times `out_scale` (None for 1) in float8_e4m3fn, bounded."""
    scaled = out.float()
    if out_scale is not None:
        if out_scale.numel() != 1:
            raise ValueError(f"out_scale has {out_scale.numel()} numbers; give one for the whole output")
        scaled = scaled * out_scale.to(out.device, torch.float32)
    return scaled.clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def _biased(heads: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns heads `[tokens, heads, head_dim]` with their bias, if any, added in float32 and rounded once."""
    return heads if bias is None else (heads.float() + bias.float()).to(heads.dtype)
