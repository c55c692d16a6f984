"""Sizes of the feed-forward half of each family's blocks: dense, or router, shared and routed experts.

Owns which layers have experts and how wide they are.  Does not know attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_beam.config.base import DecoderConfig
from batchgen_beam.config.families.deepseek import DeepseekV2Config, MlaConfig
from batchgen_beam.config.families.gemma import Gemma2Config
from batchgen_beam.config.families.glm import Glm4MoeConfig
from batchgen_beam.config.families.gpt_oss import GptOssConfig
from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.families.minimax import MiniMaxM2Config
from batchgen_beam.config.families.mistral import MixtralConfig
from batchgen_beam.config.families.phi import PhiConfig
from batchgen_beam.config.families.qwen import Qwen2MoeConfig, Qwen3MoeConfig
from batchgen_beam.config.families.smollm3 import SmolLM3Config
from batchgen_beam.config.sizes import NO_PART, Matrix, Part
from batchgen_beam.errors import CheckpointError

__all__ = ["FeedForwardSizes", "feed_forward_sizes"]

_GATED = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardSizes:
    """The feed-forward half of one block; see `LayerSizes`.  `inner` is the width between up and down of a product."""

    dense: Part
    router: Part = NO_PART
    shared: Part = NO_PART
    expert: Part = NO_PART
    experts: int = 0
    experts_per_token: int = 0
    inner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """How a layer's experts are made.  `shared_width` 0: none; `corrected`: each expert has a correction bias."""

    count: int
    chosen: int
    width: int
    module: str = "mlp"
    names: tuple[str, ...] = _GATED
    shared_width: int = 0
    shared_gate: bool = False
    corrected: bool = False


def feed_forward_sizes(config: DecoderConfig, layer: int) -> FeedForwardSizes:
    """The half of block `layer`."""
    module = f"model.layers.{layer}.mlp"
    match config:
        case PhiConfig():
            return _phi(config, module)
        case GptOssConfig():
            return _gpt_oss(config, module)
    experts = _experts(config, layer)
    if experts is not None:
        return _routed(config, layer, experts)
    hidden, inner = config.hidden_size, config.intermediate_size
    biased = isinstance(config, LlamaConfig | SmolLM3Config) and config.mlp_bias
    return FeedForwardSizes(dense=Part(module, _gated(_GATED, hidden, inner, biased), numbers=_norms(config)),
                            inner=inner)


def _norms(config: DecoderConfig) -> int:
    return (2 if isinstance(config, Gemma2Config) else 1) * config.hidden_size


def _gated(names: tuple[str, ...], hidden: int, inner: int, biased: bool = False) -> tuple[Matrix, ...]:
    gate, up, down = names
    return (Matrix(gate, inner, hidden, biased), Matrix(up, inner, hidden, biased), Matrix(down, hidden, inner, biased))


def _experts(config: DecoderConfig, layer: int) -> _Experts | None:
    """What the family's own keys say of the layer's experts; None for a dense layer."""
    match config:
        case MixtralConfig():
            return _Experts(count=config.num_local_experts, chosen=config.num_experts_per_tok,
                            width=config.intermediate_size, module="block_sparse_moe", names=_MIXTRAL)
        case MiniMaxM2Config():
            return _Experts(count=config.num_local_experts, chosen=config.num_experts_per_tok,
                            width=config.intermediate_size, module="block_sparse_moe", names=_MIXTRAL,
                            corrected=config.use_routing_bias)
        case Qwen2MoeConfig() | Qwen3MoeConfig() if config.is_sparse(layer):
            return _qwen(config)
        case MlaConfig() | Glm4MoeConfig() if config.is_sparse(layer):
            return _deepseek(config)
    return None


def _qwen(config: Qwen2MoeConfig | Qwen3MoeConfig) -> _Experts:
    shared = config.shared_expert_intermediate_size if isinstance(config, Qwen2MoeConfig) else 0
    return _Experts(count=config.num_experts, chosen=config.num_experts_per_tok, width=config.moe_intermediate_size,
                    shared_width=shared, shared_gate=bool(shared))


def _deepseek(config: MlaConfig | Glm4MoeConfig) -> _Experts:
    if config.num_experts_per_tok is None:
        raise CheckpointError(f"{config.name_or_path or config.model_type}: num_experts_per_tok is not given")
    return _Experts(count=config.n_routed_experts, chosen=config.num_experts_per_tok,
                    width=config.moe_intermediate_size, shared_width=config.n_shared_experts *
                    config.moe_intermediate_size, corrected=not isinstance(config, DeepseekV2Config))


def _routed(config: DecoderConfig, layer: int, experts: _Experts) -> FeedForwardSizes:
    hidden, module = config.hidden_size, f"model.layers.{layer}.{experts.module}"
    shared = NO_PART
    if experts.shared_width:
        gate = (Matrix("gate", 1, hidden, plain=True),) if experts.shared_gate else ()
        shared = Part(f"{module}.shared_experts", _gated(_GATED, hidden, experts.shared_width) + gate)
    return FeedForwardSizes(
        dense=Part(module, numbers=_norms(config)), shared=shared,
        router=Part(module, (Matrix("gate", experts.count, hidden, plain=True, exact=True),),
                    exact=experts.count * experts.corrected),
        expert=Part(f"{module}.experts.0", _gated(experts.names, hidden, experts.width)),
        experts=experts.count, experts_per_token=experts.chosen, inner=experts.width)


def _phi(config: PhiConfig, module: str) -> FeedForwardSizes:
    """Two biased products behind the block's one norm, which belongs to the attention half."""
    hidden, inner = config.hidden_size, config.intermediate_size
    products = Matrix("fc1", inner, hidden, True), Matrix("fc2", hidden, inner, True)
    return FeedForwardSizes(dense=Part(module, products), inner=inner)


def _gpt_oss(config: GptOssConfig, module: str) -> FeedForwardSizes:
    """Experts with biases, stored together."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    expert = (Matrix("gate_up_proj", 2 * inner, hidden, True), Matrix("down_proj", hidden, inner, True))
    return FeedForwardSizes(
        dense=Part(module, numbers=_norms(config)),
        router=Part(module, (Matrix("router", experts, hidden, plain=True, exact=True),), exact=experts),
        expert=Part(f"{module}.experts", expert), experts=experts, experts_per_token=config.num_experts_per_tok,
        inner=inner)
