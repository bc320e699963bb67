"""The architecture of a policy, read from a Hugging Face config.json."""

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from qerl_jax.errors import UserError

MODEL_TYPES = (
    *("qwen2", "qwen3", "llama", "mistral", "qwen3_5", "qwen3_moe", "qwen3_5_moe"),
    "gpt_oss",
)
NESTED_TYPES = ("qwen3_5", "qwen3_5_moe")  # a file may hold other parts beside the text model
# Qwen3.5's files say 'qwen3_5' where a vision tower and an MTP head are beside the text model,
# whose own config is then in `text_config`, and 'qwen3_5_text' where there is the text model alone.
_TEXT_TYPES = {f"{name}_text": name for name in NESTED_TYPES}
_ARCHITECTURES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# Where a file does not state them; Qwen3Moe divides the width by the heads then.
_HEAD_DIMS = {"qwen3": 128, "qwen3_5": 256, "qwen3_5_moe": 256, "gpt_oss": 64}
_BIASED = ("qwen2", "gpt_oss")  # families with biases of q, k and v, whatever their files say
_SWIGLU_ALPHA = 1.702  # as in `experts.activated`
# Where a file of gpt-oss states no rope parameters.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_LARGEST_NUMBER = 1e30
_MOST_LAYERS = 1 << 14


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies."""

    factor: float  # divisor of the low frequencies
    # Wavelengths above original_max_position / low_freq_factor are scaled fully.
    low_freq_factor: float
    high_freq_factor: float  # wavelengths below original_max_position / high_freq_factor are kept
    original_max_position: int  # context length of the pretraining, in tokens

    def __post_init__(self):
        if not 0 < self.low_freq_factor < self.high_freq_factor or not self.factor > 0:
            raise UserError(
                f"model config: rope scaling by {self.factor} between {self.low_freq_factor} and "
                f"{self.high_freq_factor}: the factors must be positive, the second range not empty"
            )
        if self.original_max_position < 1:
            raise UserError(
                f"model config: original_max_position is {self.original_max_position}, must be "
                "positive"
            )


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling of the rotary frequencies (https://arxiv.org/abs/2309.00071)."""

    factor: float  # divisor of the frequencies with few rotations
    beta_fast: float  # rotations in the original context from which a frequency is kept
    beta_slow: float  # rotations up to which a frequency is divided
    original_max_position: int  # context length of the pretraining, in tokens
    truncate: bool  # whether the two limits are rounded to whole dimensions
    attention_factor: float  # multiplies the cosines and sines

    def __post_init__(self):
        has_range = 0 < self.beta_slow < self.beta_fast < math.inf
        if not 1 <= self.factor < math.inf or not has_range:
            raise UserError(
                f"model config: YaRN by {self.factor} between {self.beta_slow} and "
                f"{self.beta_fast} rotations: the factor must be at least 1, the range not empty"
            )
        if self.original_max_position < 1 or not 0 < self.attention_factor < math.inf:
            raise UserError(
                f"model config: YaRN from {self.original_max_position} positions with "
                f"attention_factor {self.attention_factor}: both must be positive"
            )


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """The shapes of a Gated DeltaNet layer (https://arxiv.org/abs/2412.06464)."""

    key_heads: int  # number of heads of the queries and of the keys
    value_heads: int  # number of heads of the values, a multiple of key_heads; each has a state
    key_dim: int  # width of a head of the queries and of the keys
    value_dim: int  # width of a head of the values
    window: int  # number of positions that the convolution sees

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise UserError(
                    f"model config: {field.name} of the recurrent layers is "
                    f"{getattr(self, field.name)}, must be positive"
                )
        if self.window < 2:
            raise UserError(
                f"model config: window of the recurrent layers is {self.window}, must be at least 2"
            )
        if self.value_heads % self.key_heads:
            raise UserError(
                f"model config: {self.value_heads} value heads of the recurrent layers are not a "
                f"multiple of {self.key_heads} key heads"
            )

    @property
    def members(self) -> tuple[int, int, int]:
        """Numbers of channels of the queries, the keys and the values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.values

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return sum(self.members)

    @property
    def values(self) -> int:
        """Number of values of a token in all heads."""
        return self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The shapes of an MLP that is a mixture of experts (https://arxiv.org/abs/1701.06538)."""

    count: int  # number E of experts
    top_k: int  # number k of the experts that a token has
    width: int  # width F of an expert
    shared_width: int  # width of the expert that every token has; 0 without one
    # Whether the weights of the chosen experts add up to 1; else they are their parts of the
    # softmax over all experts.
    normalized: bool

    def __post_init__(self):
        for field, least in (("count", 1), ("top_k", 1), ("width", 1), ("shared_width", 0)):
            if getattr(self, field) < least:
                raise UserError(
                    f"model config: {field} of the experts is {getattr(self, field)}, must be at "
                    f"least {least}"
                )
        if self.top_k > self.count:
            raise UserError(
                f"model config: {self.top_k} experts of a token are more than all {self.count}"
            )

    @property
    def active_width(self) -> int:
        """Width of all experts of a token together."""
        return self.top_k * self.width + self.shared_width


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a Qwen2, Qwen3, Qwen3.5, Llama, Mistral or gpt-oss decoder.

    Attributes:
        model_type: one of `MODEL_TYPES`.
        vocab_size: number V of rows in the embedding.
        embed_dim: width D of the residual stream.
        mlp_dim: width F of the MLP; with experts, `ExpertsConfig.active_width`.
        num_layers: number L of layers.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads.
        head_dim: width H of an attention head.
        rope_theta: base of the rotary frequencies.
        rope_scaling: Llama 3's or YaRN's frequency scaling, or None.
        norm_eps: epsilon of every RMSNorm.
        tie_embeddings: whether the output head is the embedding.
        attention_bias: whether q, k and v have biases.
        qk_norm: whether q and k are normalized in each head.
        max_position: longest context, in tokens.
        shards: number of devices that the weights are cut into. Where it is more than 1, heads, kv
            heads, mlp_dim (padded to whole tiles of the kernels) and vocab_size are those of one
            device, see `tensor_parallel.shard_of`.
        recurrent: shapes of the recurrent layers, or None where every layer is attention.
        recurrent_layers: numbers of the layers that are recurrent.
        rotary_dim: number of dimensions of a head that are rotated, the first ones; 0 is all.
        gated_attention: whether q_proj also has a gate of each head, which follows the queries of
            the head and whose sigmoid multiplies the head's output.
        centered_norms: whether checkpoints store the scales of norms minus 1. The parameter tree
            has the scales that multiply.
        experts: shapes of the experts that every MLP is a mixture of, or None.
        sinks: whether each query head has a sink, a score without a value that is one more term of
            the sum by which its softmax divides.
        window: number of positions that a token of the layers with a window sees, its own included;
            0 for a model without such layers.
        window_layers: numbers of the layers with a window.
        other_biases: whether the output projection, the routers and the experts have biases.
        swiglu_limit: limit of the gate and up of experts, whose activation then is
            (up + 1) gate sigmoid(1.702 gate); 0 for silu(gate) up.
    """

    model_type: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | YarnScaling | None
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    max_position: int
    shards: int = 1
    recurrent: RecurrentConfig | None = None
    recurrent_layers: tuple[int, ...] = ()
    rotary_dim: int = 0
    gated_attention: bool = False
    centered_norms: bool = False
    experts: ExpertsConfig | None = None
    sinks: bool = False
    window: int = 0
    window_layers: tuple[int, ...] = ()
    other_biases: bool = False
    swiglu_limit: float = 0.0

    @property
    def digest(self) -> str:
        """Digest of the architecture, with which the same weights are another policy.

        A field with its default is left out, so that a new one keeps the digests of old runs.
        """
        fields = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]

    @property
    def packs_projections(self) -> bool:
        """Whether a format of 4 bits packs projections, too; of gpt-oss it packs experts alone."""
        return self.model_type != "gpt_oss"

    def of_layer(self, number: int) -> "ModelConfig":
        """Returns the architecture as a layer has it: without the window of other layers."""
        if not self.window or number in self.window_layers:
            return self
        return dataclasses.replace(self, window=0, window_layers=())

    def empty_routes(self, *shape: int) -> np.ndarray:
        """Returns zeros [*shape, L, k] in place of the experts of tokens, in as few bytes."""
        assert self.experts is not None
        dtype = np.min_scalar_type(self.experts.count - 1)
        return np.zeros((*shape, self.num_layers, self.experts.top_k), dtype)

    def __post_init__(self):
        for field in ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "max_position"):
            if getattr(self, field) < 1:
                raise UserError(
                    f"model config: {field} is {getattr(self, field)}, must be positive"
                )
        if self.num_layers > _MOST_LAYERS:
            raise UserError(
                f"model config: {self.num_layers} layers are more than {_MOST_LAYERS}, and no "
                "model has as many: restore the file"
            )
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model config: {self.num_heads} heads are not a multiple of "
                f"{self.num_kv_heads} kv heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"model config: head_dim is {self.head_dim}, must be even and positive")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise UserError(
                f"model config: {self.rotary_dim} rotated dimensions of a head: must be an even "
                f"number of at most {self.head_dim}"
            )
        if self.window < 0 or bool(self.window) < bool(self.window_layers):
            raise UserError(
                f"model config: a window of {self.window} positions in {len(self.window_layers)} "
                "layers: must be positive"
            )
        if not 0 <= self.swiglu_limit < math.inf:
            raise UserError(
                f"model config: swiglu_limit is {self.swiglu_limit}, must be finite and positive"
            )
        if not 0 < self.rope_theta < math.inf or not 0 <= self.norm_eps < math.inf:
            raise UserError(
                f"model config: rope_theta is {self.rope_theta}, norm_eps is {self.norm_eps}; both "
                "must be finite, the first positive and the second not negative"
            )


def from_hf_config(hf: dict[str, Any]) -> ModelConfig:
    """Reads the architecture from the contents of a config.json.

    Args:
        hf: the parsed config.json, written by transformers 4 (`rope_theta`, `rope_scaling`) or by
            transformers 5 (`rope_parameters`).

    Raises:
        UserError: a key is missing or malformed, or the model needs something that is not
            supported; the message names it.
    """
    hf = text_section(hf)
    model_type = hf.get("model_type")
    model_type = _TEXT_TYPES.get(model_type, model_type) if isinstance(model_type, str) else None
    if model_type not in MODEL_TYPES:
        raise UserError(
            f"config.json: model_type {hf.get('model_type')!r:.50} is not supported; "
            f"supported: {', '.join(MODEL_TYPES)}"
        )
    _reject_unsupported(hf, model_type)
    num_heads = _integer(hf, "num_attention_heads")
    embed_dim = _integer(hf, "hidden_size")
    rope_theta, rope_scaling = _rope(hf, model_type)
    of_family = _hybrid(hf) if model_type in NESTED_TYPES else {}
    if model_type == "gpt_oss":
        of_family = _gpt_oss(hf)
    experts = of_family.pop("experts", None)
    if model_type.endswith("_moe"):
        experts = _experts(hf, model_type)
    return ModelConfig(
        model_type=model_type,
        vocab_size=_integer(hf, "vocab_size"),
        embed_dim=embed_dim,
        mlp_dim=experts.active_width if experts else _integer(hf, "intermediate_size"),
        num_layers=_integer(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(hf, "num_key_value_heads", default=num_heads),
        head_dim=_integer(
            hf, "head_dim", default=_HEAD_DIMS.get(model_type, embed_dim // max(num_heads, 1))
        ),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_eps=_number(hf, "rms_norm_eps", default=1e-5 if model_type == "gpt_oss" else 1e-6),
        tie_embeddings=_flag(hf, "tie_word_embeddings"),
        attention_bias=model_type in _BIASED,
        qk_norm=model_type.startswith("qwen3"),
        max_position=_integer(hf, "max_position_embeddings"),
        experts=experts,
        **of_family,
    )


def text_section(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a config.json that describes the text model.

    It is the whole file, but for a model with a vision tower, whose section `text_config` it is.

    Raises:
        UserError: the section is no object.
    """
    if hf.get("model_type") not in NESTED_TYPES or "text_config" not in hf:
        return hf
    text = hf["text_config"]
    if not isinstance(text, dict):
        raise UserError(f"config.json: text_config is {text!r:.50}, must be an object")
    tied = hf.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return text | {"tie_word_embeddings": tied}


def text_config_json(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text model alone, of a model that may have a vision tower.

    Args:
        hf: the parsed config.json.
    """
    text = text_section(hf)
    if text is hf:
        return hf
    model_type = hf["model_type"]
    text |= {"architectures": [_ARCHITECTURES[model_type]], "model_type": f"{model_type}_text"}
    rope = text.get("rope_parameters") or {}
    text["rope_parameters"] = {k: v for k, v in rope.items() if not k.startswith("mrope")}
    if text["rope_parameters"].get("rope_type") == "mrope":
        text["rope_parameters"]["rope_type"] = "default"
    quantization = {key: hf[key] for key in ("quantization_config",) if key in hf}
    return {k: v for k, v in text.items() if not k.startswith("mtp_")} | quantization


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of an architecture, for transformers 4 and 5 and for vLLM."""
    hf: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "attention_dropout": 0.0,
    }
    if config.rope_scaling is not None:
        fields = dataclasses.asdict(config.rope_scaling)
        fields["original_max_position_embeddings"] = fields.pop("original_max_position")
        kind = "yarn" if isinstance(config.rope_scaling, YarnScaling) else "llama3"
        hf["rope_scaling"] = {"rope_type": kind} | fields
    if config.model_type == "gpt_oss":
        return _gpt_oss_fields(hf, config)
    if config.experts is not None:
        hf |= _expert_fields(config.experts)
    if config.recurrent is not None:
        return _hybrid_fields(hf, config, config.recurrent)
    match config.model_type:
        case "llama":
            hf |= {"attention_bias": False, "mlp_bias": False}
        case "mistral":
            hf |= {"sliding_window": None}
        case _:
            hf |= {"use_sliding_window": False, "sliding_window": None}
    if config.model_type in ("qwen3", "qwen3_moe"):
        hf["attention_bias"] = False
    if config.experts is not None:
        # The family also has layers with a plain MLP, and takes no sum of 1 for granted.
        hf |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
        hf["norm_topk_prob"] = config.experts.normalized
    return hf


def _experts(hf: dict[str, Any], model_type: str) -> ExpertsConfig:
    """Returns the experts of a config.json, with the defaults of transformers."""
    of_qwen3 = model_type == "qwen3_moe"
    for key, expected in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if hf.get(key) not in (None, expected):
            raise UserError(
                f"config.json: {key}={hf[key]!r:.50} is not supported: every MLP must be a mixture "
                f"of experts, {key}={expected}"
            )
    # transformers 5 writes the number of experts of Qwen3Moe under the other name.
    count = hf.get("num_experts", hf.get("num_local_experts"))
    shared = "shared_expert_intermediate_size"
    return ExpertsConfig(
        count=_integer({"num_experts": count}, "num_experts", default=128 if of_qwen3 else 256),
        top_k=_integer(hf, "num_experts_per_tok", default=8),
        width=_integer(hf, "moe_intermediate_size", default=768 if of_qwen3 else 512),
        shared_width=0 if of_qwen3 else _integer(hf, shared, default=512),
        normalized=_flag(hf, "norm_topk_prob") if of_qwen3 else True,
    )


def _expert_fields(experts: ExpertsConfig) -> dict[str, Any]:
    """Returns what the config.json of a mixture has in every family."""
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.shared_width,
        "output_router_logits": False,
    }


def _gpt_oss(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that only gpt-oss has, with transformers' defaults."""
    for key, expected in (("attention_bias", True), ("swiglu_alpha", _SWIGLU_ALPHA)):
        if hf.get(key, expected) != expected:
            raise UserError(
                f"config.json: {key}={hf[key]!r:.50} is not supported for gpt_oss; supported: "
                f"{expected!r}"
            )
    layers = _integer(hf, "num_hidden_layers")
    windowed = tuple(range(0, min(layers, _MOST_LAYERS), 2))
    if (kinds := hf.get("layer_types")) is not None:
        windowed = _layers_of_kind(kinds, ("sliding_attention", "full_attention"), layers)
    limit = _number(hf, "swiglu_limit", default=7.0)
    if not limit > 0:
        raise UserError(f"config.json: swiglu_limit is {limit}, must be positive")
    window = _integer(hf, "sliding_window", default=128) if windowed else 0
    # As in transformers, None is no default.
    if windowed and (window < 1 or hf.get("sliding_window", window) is None):
        given = hf["sliding_window"]
        raise UserError(f"config.json: sliding_window is {given}, must be positive")
    return {
        "experts": ExpertsConfig(
            count=_integer(hf, "num_local_experts", default=128),
            top_k=_integer(hf, "num_experts_per_tok", default=4),
            width=_integer(hf, "intermediate_size", default=2880),
            shared_width=0,
            normalized=True,
        ),
        "sinks": True,
        "window": window,
        "window_layers": windowed,
        "other_biases": True,
        "swiglu_limit": limit,
    }


def _gpt_oss_fields(hf: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Adds what the config.json of gpt-oss has."""
    assert config.experts is not None, "gpt-oss is a mixture"
    kinds = ["full_attention"] * config.num_layers
    for number in config.window_layers:
        kinds[number] = "sliding_attention"
    rope = {"rope_type": "default"} if config.rope_scaling is None else hf["rope_scaling"]
    return hf | {
        "attention_bias": True,
        "experts_per_token": config.experts.top_k,
        "intermediate_size": config.experts.width,
        "layer_types": kinds,
        "num_experts_per_tok": config.experts.top_k,
        "num_local_experts": config.experts.count,
        "output_router_logits": False,
        "rope_scaling": rope,
        "sliding_window": config.window or None,
        "swiglu_limit": config.swiglu_limit,
    }


def _layers_of_kind(kinds: Any, known: tuple[str, ...], layers: int) -> tuple[int, ...]:
    """Returns the numbers of the layers whose kind, in a list for all of them, is the first one."""
    is_list = isinstance(kinds, list) and len(kinds) == layers
    if not is_list or not all(kind in known for kind in kinds):
        raise UserError(
            f"config.json: layer_types is {kinds!r:.100}, must name one of {', '.join(known)} for "
            f"each of the {layers} layers"
        )
    return tuple(number for number, kind in enumerate(kinds) if kind == known[0])


def _hybrid(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` that only a model with recurrent layers has."""
    layers = _integer(hf, "num_hidden_layers")
    kinds = hf.get("layer_types")
    if kinds is None:
        interval = _integer(hf, "full_attention_interval", default=4)
        if interval < 1:
            raise UserError(f"config.json: full_attention_interval is {interval}, must be positive")
        recurrent = tuple(i for i in range(layers) if (i + 1) % interval)
    else:
        recurrent = _layers_of_kind(kinds, ("linear_attention", "full_attention"), layers)
    for key, expected in (("attn_output_gate", True), ("output_gate_type", "swish")):
        if hf.get(key, expected) != expected:
            raise UserError(
                f"config.json: {key}={hf[key]!r:.50} is not supported; supported: {expected!r}"
            )
    head_dim = _integer(hf, "head_dim", default=_HEAD_DIMS["qwen3_5"])
    return {
        "recurrent": RecurrentConfig(
            key_heads=_integer(hf, "linear_num_key_heads", default=16),
            value_heads=_integer(hf, "linear_num_value_heads", default=32),
            key_dim=_integer(hf, "linear_key_head_dim", default=128),
            value_dim=_integer(hf, "linear_value_head_dim", default=128),
            window=_integer(hf, "linear_conv_kernel_dim", default=4),
        ),
        "recurrent_layers": recurrent,
        "rotary_dim": int(head_dim * _rotated_fraction(hf)),
        "gated_attention": True,
        "centered_norms": True,
    }


def _rotated_fraction(hf: dict[str, Any]) -> float:
    rope = hf.get("rope_parameters") or {}
    for section in (rope if isinstance(rope, dict) else {}, hf):
        if section.get("partial_rotary_factor") is not None:
            return _number(section, "partial_rotary_factor")
    return 0.25


def _hybrid_fields(
    hf: dict[str, Any], config: ModelConfig, recurrent: RecurrentConfig
) -> dict[str, Any]:
    """Adds what the config.json of a model with recurrent layers has, as transformers 5 writes it.

    transformers 4 and vLLM before 0.20 do not know the text model alone.
    """
    fraction = (config.rotary_dim or config.head_dim) / config.head_dim
    kinds = ["full_attention"] * config.num_layers
    for number in config.recurrent_layers:
        kinds[number] = "linear_attention"
    scaling = hf["rope_scaling"] or {}
    hf = {key: value for key, value in hf.items() if key not in ("rope_theta", "rope_scaling")}
    return hf | {
        "model_type": f"{config.model_type}_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "layer_types": kinds,
        "linear_conv_kernel_dim": recurrent.window,
        "linear_key_head_dim": recurrent.key_dim,
        "linear_num_key_heads": recurrent.key_heads,
        "linear_num_value_heads": recurrent.value_heads,
        "linear_value_head_dim": recurrent.value_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": fraction,
        }
        | scaling,
    }


def _reject_unsupported(hf: dict[str, Any], model_type: str) -> None:
    if hf.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"config.json: hidden_act {hf['hidden_act']!r:.50} is not supported; supported: 'silu'"
        )
    for flag in ("attention_bias", "mlp_bias"):
        # No other bias is supported.
        if _flag(hf, flag) and not (model_type in _BIASED and flag == "attention_bias"):
            raise UserError(f"config.json: {flag}=true is not supported for {model_type}")
    if model_type in NESTED_TYPES:
        return  # `_hybrid` reads partial rotation and kinds of layers; there is no window
    rotated = hf.get("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise UserError(f"config.json: partial_rotary_factor={rotated!r:.50} is not supported")
    if model_type != "gpt_oss" and _uses_sliding_window(hf, model_type):
        window, positions = hf.get("sliding_window", "absent"), hf.get("max_position_embeddings")
        raise UserError(
            f"config.json: sliding-window attention (sliding_window={window!r:.50} of "
            f"{positions!r:.50} positions) is not supported"
        )


def _uses_sliding_window(hf: dict[str, Any], model_type: str) -> bool:
    kinds = hf.get("layer_types")
    if kinds is not None:
        return not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    # transformers takes the window of Mistral's first version where a file does not state one.
    absent = 4096 if model_type == "mistral" else None
    if hf.get("sliding_window", absent) is None:
        return False
    if model_type == "llama":
        return True
    if model_type == "mistral":  # in every layer; a window of the whole context is full attention
        window = _integer(hf, "sliding_window", default=absent)
        return window < _integer(hf, "max_position_embeddings")
    # Qwen uses the window only in the layers from max_window_layers on, and only with the flag set.
    first = _integer(hf, "max_window_layers", default=28)
    return _flag(hf, "use_sliding_window") and first < _integer(hf, "num_hidden_layers")


def _rope(hf: dict[str, Any], model_type: str) -> tuple[float, RopeScaling | YarnScaling | None]:
    # transformers prefers rope_scaling where a file has both.
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    default_theta = 10000.0
    if model_type == "gpt_oss":
        default_theta = 150000.0
        rope = rope or _GPT_OSS_ROPE
    if not isinstance(rope, dict):
        raise UserError(f"config.json: the rope parameters are {rope!r:.50}, must be an object")
    theta = rope["rope_theta"] if "rope_theta" in rope else hf.get("rope_theta", default_theta)
    theta = _number({"rope_theta": theta}, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    whole = model_type in NESTED_TYPES or rope.get("partial_rotary_factor", 1.0) == 1.0
    if not whole or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"config.json: rope parameters {rope!r:.200} are not supported")
    if kind == "default":
        return theta, None
    if model_type in NESTED_TYPES and kind == "mrope":
        return theta, None  # of a text the three positions of a token are one
    if model_type == "gpt_oss" and kind == "yarn":
        return theta, _yarn(rope, hf)
    if kind != "llama3":
        raise UserError(
            f"config.json: rope type {kind!r:.50} is not supported; supported: 'default', 'llama3'"
        )
    return theta, RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position=_integer(rope, "original_max_position_embeddings"),
    )


def _yarn(rope: dict[str, Any], hf: dict[str, Any]) -> YarnScaling:
    """Reads YaRN's parameters with the defaults of transformers."""
    original = _integer(rope, "original_max_position_embeddings")
    if rope.get("factor") is None and original > 0:
        factor = _integer(hf, "max_position_embeddings") / original
    else:
        factor = _number(rope, "factor")

    def scale(of: str = "") -> float:
        return 0.1 * (_number(rope, of) if of else 1) * math.log(factor) + 1 if factor > 1 else 1.0

    by_dims = rope.get("mscale") and rope.get("mscale_all_dim")
    attention_factor = scale("mscale") / scale("mscale_all_dim") if by_dims else scale()
    return YarnScaling(
        factor=factor,
        beta_fast=_number(rope, "beta_fast", default=32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", default=1.0) or 1.0,
        original_max_position=original,
        truncate=True if rope.get("truncate") is None else _flag(rope, "truncate"),
        attention_factor=_number(rope, "attention_factor", default=attention_factor),
    )


def _integer(values: dict[str, Any], key: str, *, default: int | None = None) -> int:
    value = values.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"config.json: {key} is {value!r:.50}, must be an integer")
    return value


def _number(values: dict[str, Any], key: str, *, default: float | None = None) -> float:
    value = values.get(key)
    if value is None and default is not None:
        return default
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= _LARGEST_NUMBER
    ):
        raise UserError(f"config.json: {key} is {value!r:.50}, must be a finite number")
    return float(value)


def _flag(values: dict[str, Any], key: str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"config.json: {key} is {value!r:.50}, must be true or false")
    return bool(value)
