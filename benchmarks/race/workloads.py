"""The five workloads: prompts with exact output lengths, from fixed seeds.

    W1   256 rows, prompts of 16-128 tokens, outputs log-normal (median 48, 4-512): a long tail
    W1s  64 rows: every fourth of W1 by rank of output length
    W2   64 rows, prompts of 512-1,024 tokens, outputs of 16-64
    W3   512 rows that share a prefix of 256 tokens, then 16-48 of their own, outputs of 32
    W4   1,024 rows for 128 slots, prompts of 16-96 tokens, outputs log-normal (median 32, 4-512)

Token ids are what counts; they come from a text of drawn words through the caller's tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ACTIVE_ROWS", "NAMES", "Row", "Workload", "generate", "read", "shared_prefix", "write"]

NAMES = ("W1", "W1s", "W2", "W3", "W4")

ACTIVE_ROWS = {"W4": 128}
"""Rows at once where a workload asks for other than 256."""

PREFIX_TOKENS = 256

Tokenize = Callable[[str], Sequence[int]]
Lengths = Callable[[np.random.Generator, int], np.ndarray]

_WHO = ("A nurse", "The editor", "Our landlord", "A pilot", "The witness", "One customer", "The architect", "A farmer",
        "Each tenant", "The inspector", "A violinist", "The cashier", "A translator", "Their captain", "The intern")
_DID = ("returned", "counted", "painted", "ordered", "misplaced", "borrowed", "signed", "weighed", "photographed",
        "postponed", "sold", "restored", "rejected", "labelled", "forgot")
_WHAT = ("three invoices", "a copper kettle", "the ferry ticket", "an old map", "seven blue chairs", "the lease",
         "a crate of plums", "the concert hall", "two spare keys", "a faulty sensor", "the annual report",
         "an unsigned letter", "the garden fence", "a pair of boots", "the night schedule")
_WHEN = ("before breakfast", "on a rainy Tuesday", "at the end of March", "during the strike", "after the second call",
         "in the old harbour", "while the lift was broken", "for less than expected", "shortly after midnight",
         "without telling anyone", "at the third attempt")
_ASK = ("Give the main point in one line.", "Which of these matters most?", "Rewrite this as a short letter.",
        "Name the people and what they did.", "Say what will probably happen next.", "Put this in plain words.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt as token ids, and how many tokens its answer has."""

    uuid: str
    prompt_ids: tuple[int, ...]
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_tokens < 1:
            raise ValueError(f"row {self.uuid} needs a prompt and a positive max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Rows in the order in which they are submitted."""

    name: str
    rows: tuple[Row, ...]

    def facts(self) -> dict[str, Any]:
        """Counts, the shared prefix, and a digest of ids and lengths."""
        digest = hashlib.sha256(json.dumps([(row.prompt_ids, row.max_tokens) for row in self.rows]).encode())
        return {"name": self.name, "rows": len(self.rows),
                "prompt_tokens": sum(len(row.prompt_ids) for row in self.rows),
                "output_tokens": sum(row.max_tokens for row in self.rows),
                "longest_row": max(len(row.prompt_ids) + row.max_tokens for row in self.rows),
                "shared_prefix": shared_prefix(self.rows), "sha256": digest.hexdigest()}


def shared_prefix(rows: Sequence[Row]) -> int:
    """Tokens that all prompts begin with, each keeping one of its own; 0 for a single row."""
    if len(rows) < 2:
        return 0
    least, most = min(row.prompt_ids for row in rows), max(row.prompt_ids for row in rows)
    longest = min(len(row.prompt_ids) for row in rows) - 1
    return next((i for i in range(longest) if least[i] != most[i]), longest)


def _uniform(low: int, high: int) -> Lengths:
    return lambda random, count: random.integers(low, high + 1, count)


def _long_tailed(median: int) -> Lengths:
    return lambda random, count: np.clip(np.rint(np.exp(random.normal(np.log(median), 1.0, count))), 4, 512)


def _constant(tokens: int) -> Lengths:
    return lambda random, count: np.full(count, tokens)


_KINDS: dict[str, tuple[int, int, Lengths, Lengths]] = {
    "W1": (101, 256, _uniform(16, 128), _long_tailed(48)),
    "W2": (202, 64, _uniform(512, 1024), _uniform(16, 64)),
    "W3": (303, 512, _uniform(16, 48), _constant(32)),
    "W4": (404, 1024, _uniform(16, 96), _long_tailed(32)),
}
"""Seed, rows, prompt lengths, output lengths."""


def _prompt(random: np.random.Generator, tokenize: Tokenize, tokens: int) -> tuple[int, ...]:
    """Exactly `tokens` ids: a request, then sentences until there are enough."""
    text = str(random.choice(_ASK))
    ids = tokenize(text)
    while len(ids) < tokens:
        for _ in range(1 + tokens // 16):
            parts = (str(random.choice(words)) for words in (_WHO, _DID, _WHAT, _WHEN))
            text += f" {' '.join(parts)}, file {random.integers(1, 10000)}."
        ids = tokenize(text)
    return tuple(ids[:tokens])


def generate(name: str, tokenize: Tokenize) -> Workload:
    """The workload of that name; `ValueError` for another name."""
    if name == "W1s":
        rows = generate("W1", tokenize).rows
        by_length = sorted(range(len(rows)), key=lambda i: rows[i].max_tokens)
        return Workload(name=name, rows=tuple(rows[i] for i in sorted(by_length[3::4])))
    if name not in _KINDS:
        raise ValueError(f"workload {name!r} is neither a file nor one of {', '.join(NAMES)}")
    seed, count, prompt_lengths, output_lengths = _KINDS[name]
    random = np.random.default_rng(seed)
    prompts, outputs = prompt_lengths(random, count), output_lengths(random, count)
    prefix = _prompt(np.random.default_rng(333), tokenize, PREFIX_TOKENS) if name == "W3" else ()
    return Workload(name=name, rows=tuple(
        Row(uuid=f"{name}-{i:04d}", prompt_ids=(*prefix, *_prompt(random, tokenize, int(prompts[i]))),
            max_tokens=int(outputs[i])) for i in range(count)))


def write(workload: Workload, path: Path) -> None:
    """JSONL that `benchmarks.workload` reads too."""
    lines = (json.dumps({"uuid": row.uuid, "prompt_ids": row.prompt_ids, "max_tokens": row.max_tokens})
             for row in workload.rows)
    path.write_text("".join(f"{line}\n" for line in lines))


def _rows(lines: Iterable[str]) -> Iterable[Row]:
    for line in lines:
        values = json.loads(line)
        yield Row(uuid=values["uuid"], prompt_ids=tuple(values["prompt_ids"]), max_tokens=values["max_tokens"])


def read(path: Path) -> Workload:
    """A workload from JSONL lines with `uuid`, `prompt_ids` and `max_tokens`."""
    return Workload(name=path.stem, rows=tuple(_rows(path.read_text().splitlines())))
