"""Two output folders compared bit for bit, and one with itself: keys, duplicates, counts.

Owns what may differ between two runs of one job (times, and what a row found computed).  Does not know how the folders
came to be.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

__all__ = ["differences", "unbalanced"]

Rows = list[dict[str, Any]]
_PLACE = ("shard", "row_group", "row", "choice_index", "uuid", "occurrence")


def published_rows(output: Path) -> Rows:
    """Rows of all results and failures, files by name, without what may differ; real numbers as their bits."""
    files = sorted(path for kind in ("results", "failures") for path in (output / kind).rglob("rg-*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return [{name: _bits(value) for name, value in row.items()
             if not name.endswith("_seconds") and name != "cached_tokens"} for row in rows]


def _bits(value: Any) -> Any:
    """The value with every real number spelt by its bits: -0.0 is not 0.0."""
    match value:
        case float():
            return value.hex()
        case list():
            return [_bits(item) for item in value]
        case dict():
            return {name: _bits(item) for name, item in value.items()}
        case _:
            return value


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _PLACE)


def differences(wanted: Path, found: Path) -> list[str]:
    """How the answers in `found` differ from those in `wanted`: lost, strange, doubled, moved and changed rows."""
    ours, theirs = published_rows(found), published_rows(wanted)
    places, expected = [_place(row) for row in ours], [_place(row) for row in theirs]
    lines = [f"lost: {place}" for place in expected if place not in set(places)]
    lines += [f"strange: {place}" for place in places if place not in set(expected)]
    lines += [f"{count} times: {place}" for place, count in Counter(places).items() if count > 1]
    if not lines and places != expected:
        lines.append("rows stand in another order")
    by_place = {_place(row): row for row in theirs}
    return lines + [line for row in ours if _place(row) in by_place for line in _changes(by_place[_place(row)], row)]


def _changes(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    for name in wanted.keys() | found.keys():
        if wanted.get(name) != found.get(name):
            yield f"changed: {_place(found)}: {name} {_short(wanted.get(name))} -> {_short(found.get(name))}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}... ({len(text)} letters)"


def unbalanced(output: Path, rows: int) -> list[str]:
    """What `run.json` of a finished output says that is not so."""
    counts = json.loads((output / "run.json").read_text())["counts"]
    found = published_rows(output)
    answered = len({_place(row) for row in found if "token_ids" in row})
    facts = {
        "rows": rows, "results": answered, "failed": len(found) - answered, "conflicts": 0,
        "completion_tokens": sum(row["completion_tokens"] for row in found if "token_ids" in row),
        "failures": dict(Counter(row["code"] for row in found if "code" in row)),
    }
    wrong = [f"{name} {counts[name]}, not {fact}" for name, fact in facts.items() if counts[name] != fact]
    if not (output / "_SUCCESS").exists():
        wrong.append("no _SUCCESS")
    return wrong
