"""How transformers' decoder layers compute, by the names of their classes, so that they can run fused.

`fused_rotary.py` and `fused_layers.py` look a layer up when its model is loaded, and divided among ranks. What
its plan says is compared there with the layer's own code. A part that computes anything else, and a layer
without a plan, runs transformers' code. `python -m tests.support.plan_search` finds the plan of another family.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class NormForm(NamedTuple):
    """How the norms of a class compute: `centred`, `plus_one` and `rounded_before` as in `Norm`. `eps`: of a
    class that does not name its epsilon."""

    centred: bool = False
    plus_one: bool = False
    rounded_before: bool = True
    eps: float | None = None


class RouterPlan(NamedTuple):
    """How a router chooses experts: by the softmax or the sigmoid of its logits (`scoring`), whose product is
    computed in float32 if it `is_wide`. `name`: of the module beside the experts. What it adds to the scores,
    and what it multiplies weights with, are read from the module, and so is whether weights are divided by
    their sum (`is_normalised`) where it says so."""

    scoring: str = "softmax"
    is_wide: bool = False
    name: str = "gate"
    is_normalised: bool = True


@dataclass(frozen=True)
class LayerPlan:
    """How a decoder layer computes, by the names of its parts. As it stands, that of a Llama.

    `mixers`: the slots that may hold what mixes tokens; the first that a layer has is its attention.
    `qkv`: the projections of q, k and v, or the one of all: of all heads of q, then of k, then of v, or
    `is_by_head` of q, k and v of the first head, then of the second. `is_gated`: whether the projection of q
    has a gate behind each head, with whose sigmoid its output is multiplied.
    `head_norms`: those of q and k, if it has them, of each head, or of all heads together (`norms_over_all`).
    `angles`: where an angle stands in the cosines and sines: in both "halves", twice in a row ("pairs") or
    "once"; None for attention that runs transformers' code. `is_interleaved`: as in RotaryEmbedding.
    `input_norm` … `after_mlp`: the norms around attention and MLP; None where there is none. `mlp`: the
    modules that run in its place, one after the other. `gate_up`: the layers of gated MLPs, or the one of
    both, gate first. `activation`: theirs, if no module of theirs computes it. `residual_factor`: the
    attribute with the factor of what is added. `adds_in_order`: whether the layer computes x + attention, and
    adds the MLP of that; otherwise its parts alone run fused.
    """

    mixers: tuple[str, ...] = ("self_attn",)
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    is_by_head: bool = False
    is_gated: bool = False
    output: str = "o_proj"
    head_norms: tuple[str, ...] = ()
    norms_over_all: bool = False
    angles: str | None = "halves"
    is_interleaved: bool = False
    input_norm: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    mlp: tuple[str, ...] = ("mlp",)
    after_mlp: str | None = None
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    activation: str | None = None
    router: RouterPlan | None = None
    residual_factor: str | None = None
    adds_in_order: bool = True

    def mixer_of(self, layer: Any) -> Any:
        """Returns what mixes tokens in `layer`; None where it is in none of the slots."""
        held = (getattr(layer, name, None) for name in self.mixers)
        return next((one for one in held if one is not None), None)

    def head_norms_of(self, attention: Any) -> list[Any]:
        """Returns the norms of q and k of `attention`; [] where this one has none."""
        return [getattr(attention, name) for name in self.head_norms if hasattr(attention, name)]


_SOFTMAX = RouterPlan()
_SIGMOID = RouterPlan("sigmoid", is_wide=True)

_LLAMA = LayerPlan()
_QWEN3 = LayerPlan(head_norms=("q_norm", "k_norm"))
_QWEN3_5 = replace(_QWEN3, mixers=("self_attn", "linear_attn"), is_gated=True)
_GRANITE = LayerPlan(residual_factor="residual_multiplier")
_GRANITE_MOE = replace(
    _GRANITE,
    mlp=("block_sparse_moe",),
    gate_up=("input_linear",),  # of the MLP beside the experts, where there is one
    down="output_linear",
    router=RouterPlan(name="router"),
)
_ERNIE = LayerPlan(is_interleaved=True)
_GLM = LayerPlan(is_interleaved=True, gate_up=("gate_up_proj",))
_GLM4 = replace(_GLM, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
_GEMMA2 = LayerPlan(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_OLMO2 = replace(
    _QWEN3,
    norms_over_all=True,
    input_norm=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_COHERE = replace(_QWEN3, angles="pairs", is_interleaved=True, adds_in_order=False)
_NEOX = LayerPlan(qkv=("query_key_value",), is_by_head=True, output="dense")
_OWN_ATTENTION = LayerPlan(angles=None)
_LFM2 = LayerPlan(
    mixers=("self_attn", "conv"),
    output="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    input_norm="operator_norm",
    before_mlp="ffn_norm",
    mlp=("feed_forward",),
    gate_up=("w1", "w3"),
    down="w2",
    activation="silu",
)

_LAYERS: tuple[tuple[LayerPlan, str], ...] = (
    (
        _LLAMA,
        """LlamaDecoderLayer ArceeDecoderLayer Cosmos3EdgeTextDecoderLayer CwmDecoderLayer Emu3DecoderLayer
        GemmaDecoderLayer Jais2DecoderLayer Ministral3DecoderLayer MinistralDecoderLayer MistralDecoderLayer
        OlmoDecoderLayer PaddleOCRDecoderLayer PhimoeDecoderLayer Qwen2DecoderLayer Qwen2VLDecoderLayer
        Qwen2_5OmniDecoderLayer Qwen2_5_VLDecoderLayer SeedOssDecoderLayer SmolLM3DecoderLayer
        Starcoder2DecoderLayer""",
    ),
    (replace(_LLAMA, router=_SOFTMAX), "MixtralDecoderLayer Qwen2MoeDecoderLayer"),
    (replace(_LLAMA, router=RouterPlan(name="router")), "AriaTextDecoderLayer"),
    (replace(_LLAMA, router=RouterPlan(is_wide=True, is_normalised=False)), "DeepseekOcr2TextDecoderLayer"),
    (replace(_LLAMA, router=_SIGMOID), "Glm4vMoeTextDecoderLayer SolarOpenDecoderLayer"),
    (replace(_LLAMA, angles="once", router=RouterPlan(name="router")), "GptOssDecoderLayer"),
    (
        replace(_LLAMA, qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
        "Phi3DecoderLayer Phi4MultimodalDecoderLayer",
    ),
    (replace(_LLAMA, before_mlp="pre_feedforward_layernorm"), "VaultGemmaDecoderLayer"),
    (replace(_LLAMA, after_attention="post_norm1", after_mlp="post_norm2"), "HyperCLOVAXDecoderLayer"),
    (
        _QWEN3,
        """Qwen3DecoderLayer ChameleonDecoderLayer HYV3DecoderLayer Molmo2DecoderLayer
        Qwen3VLTextDecoderLayer""",
    ),
    (
        replace(_QWEN3, router=_SOFTMAX),
        """MellumDecoderLayer Qwen3MoeDecoderLayer Qwen3OmniMoeThinkerTextDecoderLayer
        Qwen3VLMoeTextDecoderLayer""",
    ),
    (
        replace(_QWEN3, router=_SIGMOID),
        "Dots1DecoderLayer ExaoneMoeDecoderLayer FlintDecoderLayer Glm4MoeDecoderLayer",
    ),
    (replace(_QWEN3, norms_over_all=True), "MiniMaxM2DecoderLayer"),
    (replace(_QWEN3, norms_over_all=True, router=_SOFTMAX), "OlmoeDecoderLayer"),
    (
        replace(_QWEN3, input_norm="attention_layernorm", before_mlp="feedforward_layernorm"),
        "ApertusDecoderLayer Apertus1p5TextDecoderLayer",
    ),
    (_LFM2, "Lfm2DecoderLayer"),
    (replace(_LFM2, router=_SIGMOID), "Lfm2MoeDecoderLayer"),
    (
        replace(_LFM2, angles=None, after_attention="post_operator_norm", after_mlp="post_ffn_norm"),
        "Lfm3DecoderLayer",
    ),
    (
        _GRANITE,
        """GraniteDecoderLayer Granite4VisionTextDecoderLayer GraniteDoclingTextDecoderLayer
        GraniteSWADecoderLayer""",
    ),
    (_GRANITE_MOE, "GraniteMoeDecoderLayer GraniteMoeSWADecoderLayer GraniteMoeSharedDecoderLayer"),
    (_ERNIE, "Ernie4_5DecoderLayer Ernie4_5_MoeDecoderLayer HeliumDecoderLayer"),
    (replace(_ERNIE, angles="pairs"), "Ernie4_5_VLMoeDecoderLayer"),
    (_GLM, "GlmDecoderLayer"),
    (_GLM4, "Glm4DecoderLayer"),
    (replace(_GLM4, angles="pairs"), "Glm4vTextDecoderLayer GlmOcrTextDecoderLayer"),
    (
        replace(
            _QWEN3,
            after_attention="post_self_attn_layernorm",
            after_mlp="post_mlp_layernorm",
            router=_SIGMOID,
        ),
        "Kolibri1DecoderLayer",
    ),
    (_GEMMA2, "Gemma2DecoderLayer"),
    (replace(_GEMMA2, head_norms=("q_norm", "k_norm")), "Gemma3DecoderLayer"),
    (replace(_GEMMA2, angles=None), "Gemma4UnifiedTextDecoderLayer MuseGlimmerTextDecoderLayer"),
    (
        replace(_GEMMA2, angles=None, before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"),
        "AfmoeDecoderLayer",
    ),
    (_OLMO2, "Olmo2DecoderLayer Olmo3DecoderLayer OlmoHybridAttentionDecoderLayer"),
    (replace(_OLMO2, router=_SOFTMAX), "FlexOlmoDecoderLayer"),
    (replace(_OLMO2, norms_over_all=False), "Exaone4DecoderLayer"),
    (_COHERE, "CohereDecoderLayer Cohere2DecoderLayer"),
    (replace(_COHERE, router=_SOFTMAX), "Cohere2MoeDecoderLayer"),
    # Nemotron's and StableLM's layers do not hand keyword arguments on (adapters/adapt.py).
    (
        replace(_LLAMA, adds_in_order=False),
        "CohereCompassDecoderLayer NemotronDecoderLayer StableLmDecoderLayer",
    ),
    (replace(_LLAMA, output="dense", adds_in_order=False), "PhiDecoderLayer"),
    (replace(_NEOX, mixers=("attention",), adds_in_order=False), "GPTNeoXLayer"),
    (replace(_NEOX, head_norms=("q_layernorm", "k_layernorm")), "PersimmonDecoderLayer"),
    # Layers with states beside attention.
    (replace(_OWN_ATTENTION, mixers=("linear_attn",)), "OlmoHybridLinearAttentionDecoderLayer"),
    (_QWEN3_5, "Qwen3_5DecoderLayer"),
    (replace(_QWEN3_5, router=_SOFTMAX), "Qwen3_5MoeDecoderLayer Qwen3NextDecoderLayer"),
    # Granite's with a mixture adds two MLPs. Bamba's, Falcon-H1's and MiniMax's compute more than a sum.
    (
        replace(
            _GRANITE,
            mixers=("self_attn", "mamba"),
            mlp=("shared_mlp",),
            gate_up=("input_linear",),
            down="output_linear",
            router=RouterPlan(name="router"),
        ),
        "GraniteMoeHybridDecoderLayer",
    ),
    (
        replace(_LLAMA, mixers=("self_attn", "mamba"), mlp=("feed_forward",), adds_in_order=False),
        "BambaDecoderLayer FalconH1DecoderLayer",
    ),
    (replace(_LLAMA, router=_SOFTMAX, adds_in_order=False), "MiniMaxDecoderLayer"),
    # Attention with a gate, or with norms or scales between positions and attention.
    (
        _OWN_ATTENTION,
        """BitNetDecoderLayer HunYuanDenseV1DecoderLayer HunYuanMoEV1DecoderLayer HunYuanVLDenseV1DecoderLayer
        NanoChatDecoderLayer Step3p7DecoderLayer""",
    ),
    (replace(_OWN_ATTENTION, router=_SIGMOID), "MiMoV2FlashDecoderLayer"),
    (replace(_OWN_ATTENTION, router=RouterPlan("sigmoid")), "LagunaDecoderLayer"),
    (replace(_OWN_ATTENTION, gate_up=("fc1",), down="fc2"), "MoshiDecoderLayer"),
    (
        replace(
            _OWN_ATTENTION,
            mixers=("attn",),
            input_norm="attn_norm",
            before_mlp="mlp_norm",
            gate_up=("Wi",),
            down="Wo",
        ),
        "ModernBertDecoderLayer",
    ),
    (
        replace(_OWN_ATTENTION, adds_in_order=False),
        "DiffLlamaDecoderLayer Gemma3nTextDecoderLayer Gemma4TextDecoderLayer",
    ),
    (replace(_OWN_ATTENTION, mlp=("feed_forward",)), "Llama4TextDecoderLayer"),
    (replace(_OWN_ATTENTION, adds_in_order=False, router=_SIGMOID), "BeamDecoderLayer"),
)
PLANS = {name: plan for plan, names in _LAYERS for name in names.split()}

# The forms of norms, by the names of their classes. Another class that is called an RMSNorm computes as
# Llama's.
_RMS = NormForm()
_NORMS: tuple[tuple[NormForm, str], ...] = (
    (
        NormForm(rounded_before=False),
        """RMSNorm AfmoeRMSNorm BeamRMSNorm FlexOlmoRMSNorm FlintRMSNorm Gemma3nRMSNorm Gemma4RMSNorm
        Gemma4UnifiedRMSNorm GptOssRMSNorm HeliumRMSNorm MoshiRMSNorm MuseGlimmerRMSNorm MuseSparkRMSNorm
        NemotronHRMSNorm Olmo2RMSNorm Olmo3RMSNorm OlmoHybridRMSNorm""",
    ),
    (
        NormForm(plus_one=True, rounded_before=False),
        """GemmaRMSNorm Gemma2RMSNorm Gemma3RMSNorm MuseGlimmerTextCenteredRMSNorm
        MuseSparkTextCenteredRMSNorm Qwen3NextRMSNorm Qwen3_5RMSNorm Qwen3_5MoeRMSNorm Step3p7RMSNorm
        VaultGemmaRMSNorm""",
    ),
    (
        NormForm(centred=True, rounded_before=False),
        "LayerNorm CohereLayerNorm Cohere2LayerNorm Cohere2MoeLayerNorm CohereCompassLayerNorm",
    ),
    (NormForm(centred=True, rounded_before=False, eps=1e-5), "OlmoLayerNorm"),
    (NormForm(centred=True, plus_one=True, rounded_before=False), "NemotronLayerNorm1P"),
    (_RMS, "Llama4TextL2Norm"),
)
_FORMS = {name: form for form, names in _NORMS for name in names.split()}


def planned_layers(model: Any) -> dict[Any, LayerPlan]:
    """Returns the decoder layers of `model` that have a plan, with it, in the order in which they stand."""
    return {one: PLANS[name] for one in model.modules() if (name := type(one).__name__) in PLANS}


def norm_form(module: Any) -> NormForm | None:
    """Returns how `module` computes, if it is a norm."""
    name = type(module).__name__
    return _FORMS.get(name, _RMS if name.endswith("RMSNorm") else None)
