"""Compact bytes for what crosses a shuffle in bulk: rows, places, answers, manifests.

Owns an encoding that lives as long as one job.  Does not know the keys of shuffles or what is done with the values.
Frozen slotted records pickle slowly as objects; their values in a tuple do not.
"""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import Any

import pyarrow as pa

from batchgen_beam.records import (
    Answer,
    ContinuationRecord,
    Failure,
    FinishReason,
    InputRow,
    Outcome,
    RowKey,
    SamplingParams,
    TokenLogprobs,
)
from batchgen_beam.storage.units import Manifest, PlacedAnswer, Placement

__all__ = ["Parcel", "open_sealed", "pack", "seal", "unpack"]

Parcel = Placement | Answer | Manifest | PlacedAnswer | InputRow | ContinuationRecord

_SEPARATE = ("key", "finish_reason", "logprobs", "params")
_PLAIN_NAMES = tuple(name for name in Outcome.__dataclass_fields__ if name not in _SEPARATE)
_plain_values = attrgetter(*_PLAIN_NAMES)
_logprob_values = attrgetter(*TokenLogprobs.__dataclass_fields__)
_param_values = attrgetter(*SamplingParams.__dataclass_fields__)

Plain = tuple[Any, ...]


def pack(parcel: Parcel) -> bytes:
    """The parcel's bytes; `unpack` restores an equal one."""
    return pickle.dumps(_plain(parcel), protocol=5)


def _plain(parcel: Parcel) -> Plain:
    match parcel:
        case Placement():
            return "place", parcel.unit, parcel.row, parcel.rank, parcel.occurrence
        case Outcome():
            return ("outcome", parcel.key.text, str(parcel.finish_reason), _logprob_values(parcel.logprobs),
                    _param_values(parcel.params), _plain_values(parcel))
        case Failure():
            return "failure", parcel.key.text, parcel.code, parcel.message, parcel.prompt_head, parcel.poison
        case PlacedAnswer():
            return "placed", parcel.row, parcel.rank, parcel.occurrence, [_plain(answer) for answer in parcel.answers]
        case Manifest():
            return "manifest", parcel.unit, parcel.keys, parcel.digest, parcel.kept
        case InputRow():
            return "row", parcel.key.text, parcel.values, parcel.problem
        case ContinuationRecord():
            return "continuation", parcel.to_bytes()


def unpack(data: bytes) -> Any:
    """The inverse of `pack`."""
    return _restored(pickle.loads(data))


def _restored(plain: Plain) -> Parcel:
    match plain:
        case "place", *values:
            return Placement(*values)
        case "failure", key, code, message, head, poison:
            return Failure(key=RowKey.parse(key), code=code, message=message, prompt_head=head, poison=poison)
        case "placed", row, rank, occurrence, answers:
            restored: Any = tuple(_restored(answer) for answer in answers)
            return PlacedAnswer(row=row, rank=rank, occurrence=occurrence, answers=restored)
        case "manifest", unit, keys, digest, kept:
            return Manifest(unit=unit, keys=keys, digest=digest, kept=kept)
        case "row", key, values, problem:
            return InputRow(key=RowKey.parse(key), values=values, problem=problem)
        case "continuation", data:
            return ContinuationRecord.from_bytes(data)
        case _:
            return _outcome(*plain[1:])


def _outcome(key: str, reason: str, logprobs: Plain, params: Plain, values: Plain) -> Outcome:
    return Outcome(
        key=RowKey.parse(key), finish_reason=FinishReason(reason),
        logprobs=TokenLogprobs(**dict(zip(TokenLogprobs.__dataclass_fields__, logprobs, strict=True))),
        params=SamplingParams(**dict(zip(SamplingParams.__dataclass_fields__, params, strict=True))),
        **dict(zip(_PLAIN_NAMES, values, strict=True)))


_SIZE_BYTES = 8


def seal(value: object) -> bytes:
    """Any value for a shuffle: the size of its pickle, then the pickle, compressed."""
    plain = pickle.dumps(value, protocol=5)
    packed: bytes = pa.compress(plain, codec="zstd", asbytes=True)
    return len(plain).to_bytes(_SIZE_BYTES, "big") + packed


def open_sealed(sealed: bytes) -> Any:
    """The inverse of `seal`."""
    size = int.from_bytes(sealed[:_SIZE_BYTES], "big")
    return pickle.loads(pa.decompress(sealed[_SIZE_BYTES:], size, codec="zstd", asbytes=True))
