"""What users' scripts and dashboards stand on: flags, subcommands, exit codes, metric names."""

from __future__ import annotations

import argparse

import pytest

from batchgen_beam.errors import OptionError
from batchgen_beam.pipelines import main
from batchgen_beam.pipelines.options import OPTIONS, parse_options, parse_size
from batchgen_beam.transforms.metrics import ALL_METRICS

FLAGS = [
    "--input", "--output", "--model", "--model-cache", "--model-facts", "--chat-template", "--dtype",
    "--kv-dtype", "--kernels", "--threads", "--max-rows", "--step-tokens", "--prefill-chunk",
    "--attention-batch", "--expert-batch", "--kv-memory", "--kv-host-memory", "--weight-memory", "--max-context",
    "--tail-processes", "--temperature", "--top-k", "--top-p", "--max-tokens", "--seed", "--logprobs",
    "--eos-ids", "--id-column", "--prompt-column", "--messages-column", "--token-ids-column", "--keep-columns",
    "--ignore-columns", "--accelerator", "--worker-ram", "--lanes", "--rounds", "--limit", "--allow-failures",
    "--retry-failed", "--new-fingerprint", "--flush-interval", "--checkpoint-interval", "--compact-after",
    "--progress-interval",
]

METRICS = [
    "rows_answered", "rows_failed", "prompt_tokens", "generated_tokens", "model_load_msecs", "batch_fill_percent",
    "evictions", "holds", "recomputed_tokens",
    "rows_failed_empty_prompt", "rows_failed_prompt_too_long", "rows_failed_invalid_text",
    "rows_failed_invalid_row", "rows_failed_invalid_parameter", "rows_failed_unsupported_parameter",
    "rows_failed_template_error", "rows_failed_numeric_error", "rows_failed_grammar_error",
    "rows_failed_capacity_exceeded", "rows_failed_cancelled", "rows_failed_engine_error",
]


def test_flags_are_frozen() -> None:
    """A flag may be added; one that is renamed or removed breaks users' commands."""
    assert [option.flag for option in OPTIONS] == FLAGS


def test_subcommands_and_exit_codes_are_frozen() -> None:
    """Scripts decide by these numbers."""
    assert list(main.COMMANDS) == ["run", "demo", "plan", "inspect", "bench"]
    assert (main.OK, main.FATAL, main.USER_ERROR, main.ROWS_FAILED, main.INTERRUPTED) == (0, 1, 2, 3, 130)


def test_metric_names_are_frozen() -> None:
    """Dashboards are built on these names."""
    assert sorted(ALL_METRICS) == sorted(METRICS)


def test_flags_mix_with_beams_own() -> None:
    """One command line feeds both; patterns gather."""
    options = parse_options(["--input=a", "--input", "b", "--runner=FnApiRunner", "--direct_num_workers=2",
                             "--keep-columns=x, y", "--kv-memory=1.5GiB"])
    assert (options.input, options.keep_columns, options.kv_memory) == (["a", "b"], ("x", "y"), 3 << 29)
    assert options.model_cache == ".cache/converted"
    assert parse_options(['--keep-columns=["a, b", "c"]']).keep_columns == ("a, b", "c")
    assert parse_options(["--eos-ids=2, 7"]).eos_ids == (2, 7)


@pytest.mark.parametrize(("flags", "message"), [
    (["--modell=x"], "unknown flag or stray value: --modell=x"),
    (["--mod=x"], "--mod=x"),
    (["stray"], "stray"),
    (["--dtype=fp8"], r"--dtype: 'fp8' is unknown; use one of bfloat16, float32"),
    (["--kv-dtype=bfloat16"], r"--kv-dtype: 'bfloat16' is unknown; use one of auto, int8"),
    (["--kv-memory=2XiB"], r"--kv-memory: '2XiB' is no size"),
    (["--max-rows=many"], r"--max-rows: 'many' is no integer"),
    (["--eos-ids=2,end"], r"--eos-ids: 'end' is no integer"),
    (["--keep-columns=a,,b"], r"--keep-columns: 'a,,b' holds an empty column name"),
    (["--direct_running_mode=fast"], "direct_running_mode"),
])
def test_unknown_flags_and_values_are_refused_by_name(flags: list[str], message: str) -> None:
    """A typo is never silently ignored, in our flags or in Beam's."""
    with pytest.raises(OptionError, match=message):
        parse_options(flags)


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("17", 17), ("2GiB", 2 << 30), ("1.5 MB", 1_500_000), ("3kib", 3072)])
def test_sizes(text: str, size: int) -> None:
    """Bytes, or a number with a decimal or binary unit."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 gigs"])
def test_what_is_no_size(text: str) -> None:
    """Refused with the text."""
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        parse_size(text)
