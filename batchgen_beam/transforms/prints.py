"""The two prints: what decides the answers, and what decides their last bits.

Owns which facts belong to which.  The content print decides whether an output folder may be reused; the numeric print
is stored with every answer.  Never a path, a name or a time is part of either.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchgen_beam.records import Fingerprint
from batchgen_beam.settings import OUTPUT_VERSION, GenerationDefaults
from batchgen_beam.transforms.model_folder import ModelFolder

__all__ = ["TEMPLATE_CLOCK", "content_print", "numeric_print"]

TEMPLATE_CLOCK = "template_clock"
"""The fact that a resumed run takes over from the output folder, so that its prompts say the same date."""


def content_print(model: ModelFolder, defaults: GenerationDefaults, *, dtype: str, kv_dtype: str,
                  clock: str) -> Fingerprint:
    """Facts that decide the answer of a row; `clock` counts only where the template asks for the time, `kv_dtype` only
    where it is not the arithmetic's.

    An `OptionError` names a default that is out of its range.
    """
    params = model.parameter_rules(defaults).effective({})
    template = model.template
    facts: dict[str, object] = {
        **model.content(),
        "dtype": dtype,
        "seed": defaults.seed,
        "logprobs": defaults.logprobs,
        "max_tokens": defaults.max_tokens,
        "output_version": OUTPUT_VERSION,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
    }
    if template is not None and template.uses_clock:
        facts[TEMPLATE_CLOCK] = clock
    if kv_dtype != "auto":
        facts["kv_dtype"] = kv_dtype
    return Fingerprint.of(facts)


def numeric_print(kernel_facts: Mapping[str, object], *, deterministic: bool) -> Fingerprint:
    """What decides the bits: the kernel set's own facts, and whether its self-test held on this machine."""
    return Fingerprint.of({**kernel_facts, "deterministic": deterministic})
