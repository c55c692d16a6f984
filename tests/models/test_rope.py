"""Frequencies and tables against transformers' own functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from batchgen_beam.config.rope import RopeParameters
from batchgen_beam.models.rope import rope_frequencies, rope_tables

THETA = 10_000.0
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn fast": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 2.0, "beta_slow": 0.5},
    "yarn untruncated": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 2.0, "truncate": False},
    "yarn mscale": {"factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn fixed": {"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
    "yarn point": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 1.0, "truncate": False},
}


def reference(rope_type: str, head_size: int, limit: int, **keys: Any) -> ReferenceConfig:
    """A transformers config with this rope."""
    return ReferenceConfig(hidden_size=4 * head_size, num_attention_heads=4, num_hidden_layers=1, vocab_size=8,
                           head_dim=head_size, max_position_embeddings=limit,
                           rope_parameters={"rope_type": rope_type, "rope_theta": THETA, **keys})


@pytest.mark.parametrize("head_size", [16, 64])
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_equal_the_reference(name: str, head_size: int) -> None:
    """Every kind gives the reference's float32 frequencies and attention factor."""
    kind, keys = name.split()[0], KINDS[name]
    ours, factor = rope_frequencies(RopeParameters(rope_type=kind, theta=THETA, **keys), head_size, 512)
    embedding = LlamaRotaryEmbedding(reference(kind, head_size, 512, **keys))
    # 2 units in the last place: divisions by a factor may be folded in another order
    torch.testing.assert_close(ours, embedding.inv_freq, rtol=2.4e-7, atol=0)
    assert factor == pytest.approx(embedding.attention_scaling, rel=1e-12)


def test_tables_equal_the_reference_at_far_positions() -> None:
    """Cosines at position 8,000 are the reference's, where one last bit of an angle is worth 5e-4."""
    positions = torch.arange(8192)
    tables = rope_tables(RopeParameters(theta=THETA), 64, 8192, torch.device("cpu"))
    cos, sin = LlamaRotaryEmbedding(reference("default", 64, 8192))(torch.zeros(1), positions[None])
    # one rounding of a value up to 1
    torch.testing.assert_close(tables.cos_Cf, cos[0, :, :32], rtol=0, atol=1.2e-7)
    torch.testing.assert_close(tables.sin_Cf, sin[0, :, :32], rtol=0, atol=1.2e-7)


def test_dynamic_is_fixed_by_the_models_limits() -> None:
    """`dynamic` takes the run's own limit for the length; within the original length it changes nothing."""
    original, limit = 64, 256
    rope = RopeParameters(rope_type="dynamic", theta=THETA, factor=2.0, original_max_position_embeddings=original)
    ours, _ = rope_frequencies(rope, 16, limit)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference("dynamic", 16, original, factor=2.0), seq_len=limit)
    torch.testing.assert_close(ours, expected, rtol=2.4e-7, atol=0)
    plain, _ = rope_frequencies(RopeParameters(theta=THETA), 16, limit)
    assert torch.equal(rope_frequencies(rope, 16, original)[0], plain)
    assert not torch.allclose(ours, plain)


def test_a_position_decides_its_line() -> None:
    """A longer table begins with the bits of a shorter one."""
    rope = RopeParameters(theta=THETA)
    short, long = (rope_tables(rope, 64, limit, torch.device("cpu")) for limit in (100, 777))
    assert torch.equal(short.cos_Cf, long.cos_Cf[:100])
    assert torch.equal(short.sin_Cf, long.sin_Cf[:100])


def test_yarn_scales_both_tables() -> None:
    """The yarn attention factor multiplies cosine and sine: at position 0 the cosine is the factor."""
    rope = RopeParameters(rope_type="yarn", theta=THETA, factor=8.0, original_max_position_embeddings=64)
    tables = rope_tables(rope, 16, 4, torch.device("cpu"))
    assert tables.cos_Cf[0, 0].item() == pytest.approx(0.1 * math.log(8.0) + 1.0, rel=1e-6)
