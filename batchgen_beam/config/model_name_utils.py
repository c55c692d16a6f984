"""Two literal tests on model names.  They flag, they never choose model code: a folder's config.json does that."""

from __future__ import annotations

import re

__all__ = ["is_glm5_backend_model", "is_kimi_k25_backend_model"]

_GLM5 = re.compile(r"glm[-_]?5")
_KIMI_K25 = re.compile(r"kimi[-_]k2\.?[56]")


def is_glm5_backend_model(model_name: str | None) -> bool:
    """Whether the name, stripped and lower-cased, contains `glm-5`, `glm_5` or `glm5`; None counts as empty."""
    return _GLM5.search(_clean(model_name)) is not None


def is_kimi_k25_backend_model(model_name: str | None) -> bool:
    """Whether the name contains `kimi-` or `kimi_` directly followed by `k2.5`, `k25`, `k2.6` or `k26`."""
    return _KIMI_K25.search(_clean(model_name)) is not None


def _clean(model_name: str | None) -> str:
    return (model_name or "").strip().lower()
