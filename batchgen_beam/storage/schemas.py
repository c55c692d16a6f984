"""The frozen columns of published files.  Schemas are fixed, never inferred from rows."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from batchgen_beam.errors import OptionError

__all__ = ["FAILURE_SCHEMA", "LOGPROBS", "RESULT_SCHEMA", "check_kept_names"]


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


LOGPROBS = pa.list_(pa.struct([
    pa.field("logprob", pa.float32()),
    pa.field("top", pa.list_(pa.struct([_required("token_id", pa.int32()), pa.field("logprob", pa.float32())]))),
]))
"""One entry a generated token: its own log-probability, then the most likely tokens.  Not finite: null."""

RESULT_SCHEMA = pa.schema([
    _required("uuid", pa.string()),
    _required("occurrence", pa.int32()),
    _required("choice_index", pa.int32()),
    pa.field("text", pa.string()),
    _required("token_ids", pa.list_(pa.int32())),
    _required("finish_reason", pa.string()),
    pa.field("stop_reason", pa.string()),
    _required("prompt_tokens", pa.int32()),
    _required("cached_tokens", pa.int32()),
    _required("completion_tokens", pa.int32()),
    _required("logprobs", LOGPROBS),
    _required("temperature", pa.float64()),
    _required("top_k", pa.int32()),
    _required("top_p", pa.float64()),
    pa.field("max_tokens", pa.int32()),
    _required("seed", pa.int64()),
    _required("model", pa.string()),
    _required("content_print", pa.string()),
    _required("numeric_print", pa.string()),
    _required("shard", pa.string()),
    _required("row_group", pa.int32()),
    _required("row", pa.int64()),
    _required("queue_seconds", pa.float64()),
    _required("generate_seconds", pa.float64()),
])
"""Columns of `results/`; the kept input columns follow with their own types, bytes of
texts that are not UTF-8 as escapes such as `\\udcff`.  `occurrence` counts the earlier rows with the same id in the
same file; a seed of 2**63 or more is stored as the signed number of the same 64 bits."""

FAILURE_SCHEMA = pa.schema([
    _required("uuid", pa.string()),
    _required("occurrence", pa.int32()),
    _required("code", pa.string()),
    _required("message", pa.string()),
    _required("prompt_head", pa.string()),
    _required("shard", pa.string()),
    _required("row_group", pa.int32()),
    _required("row", pa.int64()),
])
"""Columns of `failures/`."""


def check_kept_names(keep: Sequence[str]) -> None:
    """Refuse to keep a column under a name that results already use, or twice."""
    for position, name in enumerate(keep):
        if name in RESULT_SCHEMA.names:
            raise OptionError(f"column {name!r} can't be kept: results have one of that name. Rename it in the input")
        if name in keep[:position]:
            raise OptionError(f"column {name!r} is named twice among the columns to keep")
