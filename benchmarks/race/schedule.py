"""The order of the runs, and which of them are done again.  Knows processes only as a function that runs one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from benchmarks.race.process import Outcome

__all__ = ["agreement", "order", "race"]

Ids = Sequence[Sequence[int]]


def order(names: Sequence[str], repeat: int) -> list[str]:
    """Engines of one repeat: every second one backwards, each pair begun one engine later.

    So no engine is always first, and none always follows the same other one.
    """
    start = (repeat // 2) % len(names)
    turned = [*names[start:], *names[:start]]
    return turned[::-1] if repeat % 2 else turned


def agreement(ours: Ids, theirs: Ids) -> dict[str, float]:
    """Share of rows with the same ids, and the mean number of first ids that are the same."""
    same, common = 0, 0
    for mine, other in zip(ours, theirs, strict=True):
        same += list(mine) == list(other)
        pairs = enumerate(zip(mine, other, strict=True))
        common += next((i for i, (a, b) in pairs if a != b), len(mine))
    return {"equal_rows": round(same / len(ours), 4), "mean_common_prefix": round(common / len(ours), 2)}


def race(names: Sequence[str], *, repeats: int, retries: int, most_others: float,
         run: Callable[[str, int, int], Outcome], once: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """One record per process, as it ends.

    A process during whose batch others used more than `most_others` of the CPU is run again, at most `retries` times.
    An engine that once failed or was over the limit is not run in later repeats, nor is one of `once`.  Greedy ids are
    compared with those of the first run of `ours` that came before.
    """
    out: set[str] = set()
    first_ours: Ids | None = None
    for repeat in range(repeats):
        for name in order(names, repeat):
            if name in out or (repeat and name in once):
                continue
            for attempt in range(retries + 1):
                done = run(name, repeat, attempt)
                record = {"engine": name, "repeat": repeat, "attempt": attempt, "outcome": done.outcome, **done.figures}
                if done.outcome != "ok":
                    out.add(name)
                    yield record
                    break
                assert done.ids is not None
                first_ours = done.ids if first_ours is None and name.split(":")[0] == "ours" else first_ours
                if first_ours is not None:
                    record["agreement"] = agreement(first_ours, done.ids)
                disturbed = done.figures["others_share"] > most_others
                yield {**record, "outcome": "disturbed" if disturbed else "ok"}
                if not disturbed:
                    break
