"""One file per group of model families; importing this package registers all of them."""

from batchgen_beam.config.families import (
    deepseek,
    fake,
    gemma,
    glm,
    gpt_oss,
    kimi,
    llama,
    minimax,
    mistral,
    phi,
    qwen,
    smollm3,
)

__all__ = [
    "deepseek",
    "fake",
    "gemma",
    "glm",
    "gpt_oss",
    "kimi",
    "llama",
    "minimax",
    "mistral",
    "phi",
    "qwen",
    "smollm3",
]
