"""The main job on the committed example rows, with a small real model.

Owns the demo's defaults.  It is `batchgen-beam run` with flags filled in, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchgen_beam.errors import OptionError
from batchgen_beam.pipelines.options import BatchgenOptions, parse_options

__all__ = ["DEMO_FLAGS", "demo_options"]

DEMO_MODEL = ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"

DEMO_FLAGS = {
    "--model": DEMO_MODEL,
    "--input": "examples/*.parquet",
    "--output": "out/demo",
    "--max-tokens": "64",
    "--progress-interval": "2",
}
"""Flags that the demo gives where the user does not."""

INPUT_FLAGS = {"--keep-columns": "task,ticket_id"}
"""Such as only make sense with the demo's own rows."""


def demo_options(flags: Sequence[str]) -> BatchgenOptions:
    """The options of the demo.  Its six bad rows are part of it: failed rows do not change the exit code.

    Raises `OptionError` where the model has not been fetched.
    """
    given = {flag.partition("=")[0] for flag in flags}
    defaults = DEMO_FLAGS if "--input" in given else DEMO_FLAGS | INPUT_FLAGS
    filled = [f"{flag}={value}" for flag, value in defaults.items() if flag not in given]
    options = parse_options([*filled, "--allow-failures", *flags])
    if not Path(options.model).exists():
        raise OptionError(f"the demo's model {options.model} is not there; `make demo` fetches it, or name another "
                          "with --model")
    return options
