"""Which family a bare public model name belongs to.  Never asked about a folder: its config.json decides.

A table of patterns on the last part of the name, most specific first; None marks names that look like one of our
families and are another architecture.
"""

from __future__ import annotations

import re

__all__ = ["KNOWN_NAMES", "model_type_of_name"]

_BARE_NAME = re.compile(r"(?:[\w.-]+/)?(?P<model>[\w.-]+)(?:@[\w./-]+)?", re.ASCII)

KNOWN_NAMES: tuple[tuple[re.Pattern[str], str | None], ...] = tuple(
    (re.compile(pattern), model_type)
    for pattern, model_type in (
        (r"gguf", None),
        (r"(^|[-_.])(vl|vision|audio|omni|multimodal)([-_.]|$)", None),
        (r"(distill|0528).*qwen3", "qwen3"),
        (r"distill.*qwen", "qwen2"),
        (r"distill.*llama", "llama"),
        (r"^kimi-dev", "qwen2"),
        (r"^qwen3-next", None),
        (r"^qwen3-.*\d+b-a\d", "qwen3_moe"),
        (r"^qwen3(-|guard-)", "qwen3"),
        (r"^qwen1\.5-moe|^qwen2-57b-a14b", "qwen2_moe"),
        (r"^qwen(1\.5|2|2\.5)-|^qwq-", "qwen2"),
        (r"^gemma-3-(270m|1b)", "gemma3_text"),
        (r"^gemma-3-\d+b", "gemma3"),
        (r"^gemma-2-\d+b", "gemma2"),
        (r"^mixtral-", "mixtral"),
        (r"^mistral-small-3\.[12]-", "mistral3"),
        (r"^mistral-(7b|nemo-|small-(24b|instruct)|large-instruct)", "mistral"),
        (r"^phi-(1|1_5|2)$", "phi"),
        (r"^phi-(3-mini|3-medium|3\.5-mini|4-mini|4-reasoning|4$)", "phi3"),
        (r"^deepseek-v3\.2", "deepseek_v32"),
        (r"^deepseek-(v3|r1)(?!\d)|^moonlight-", "deepseek_v3"),
        (r"^deepseek-(coder-)?v2", "deepseek_v2"),
        (r"^deepseek-(llm|coder)-", "llama"),
        (r"^kimi[-_](k2\.[56]|k2[56](?!\d))", "kimi_k25"),
        (r"^kimi-k2(?![.\w])", "kimi_k2"),
        (r"^kimi-k3", "kimi_k3"),
        (r"^kimi-linear-", "kimi_linear"),
        (r"^glm[-_]?[45].*flash", None),
        (r"^glm[-_]?5(\.\d+|[1-9])?(?![.\w])", "glm_moe_dsa"),
        (r"^glm-4\.[5-7](?![.\w])", "glm4_moe"),
        (r"^gpt-oss-", "gpt_oss"),
        (r"^minimax-m2(\.\d+)?(?![.\w])", "minimax_m2"),
        (r"^smollm3-", "smollm3"),
        (r"^smollm2?-|^tinyllama|(^|-)(code)?llama-?[23](\.\d)?-\d+b", "llama"),
    )
)


def model_type_of_name(name: str) -> str | None:
    """The model type of a public name such as `org/Model-7B` or `org/Model-7B@main`; None if it is none of ours."""
    found = _BARE_NAME.fullmatch(name.strip())
    if found is None:
        return None
    model = found["model"].lower()
    return next((model_type for pattern, model_type in KNOWN_NAMES if pattern.search(model)), None)
