"""Tables and figures from race files.

A race file is what one `run` wrote: workload, machine, rates and bound, and a record for each process.  Only
undisturbed runs count; an engine that has none is shown with its least disturbed ones, marked, or with the reason why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["find_races", "lines_of", "markdown", "summary"]

Race = Mapping[str, Any]
Record = Mapping[str, Any]

_HEAD = ("engine", "runs", "median s", "min-max", "out tok/s", "load s", "with load s", "peak RSS GiB", "others' CPU %",
         "of the bound", "ours ÷ it")


def find_races(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Race files in these folders, by name."""
    files = sorted(file for folder in folders for file in folder.glob("race-*.json"))
    return [json.loads(file.read_text()) for file in files]


def _counted(records: Sequence[Record]) -> tuple[list[Record], bool]:
    """The runs that count, and whether they are disturbed ones: then the best of each repeat."""
    clean = [record for record in records if record["outcome"] == "ok"]
    if clean:
        return clean, False
    repeats: dict[int, Record] = {}
    for record in records:
        if record["outcome"] == "disturbed":
            known = repeats.get(record["repeat"])
            if known is None or record["others_share"] < known["others_share"]:
                repeats[record["repeat"]] = record
    return list(repeats.values()), True


def _figures(race: Race, name: str, records: Sequence[Record]) -> dict[str, Any]:
    counted, disturbed = _counted(records)
    figures: dict[str, Any] = {"engine": name, "runs": len(counted), "disturbed": disturbed,
                               "others_outcomes": sorted({record["outcome"] for record in records} - {"ok"})}
    if not counted:
        return figures
    seconds = [record["seconds"] for record in counted]
    loads = [record["load_seconds"] + record["warmup_seconds"] for record in counted]
    figures |= {
        "median_seconds": median(seconds), "least_seconds": min(seconds), "most_seconds": max(seconds),
        "output_tokens_per_second": race["workload"]["output_tokens"] / median(seconds),
        "load_seconds": median(loads),
        "with_load_seconds": median(a + b for a, b in zip(seconds, loads, strict=True)),
        "peak_rss_gib": max(record["peak_rss_mib"] for record in counted) / 1024,
        "others_share": max(record["others_share"] for record in counted),
        "agreement": counted[0].get("agreement"), "facts": counted[0]["facts"]}
    if "bound" in race:
        figures["of_bound"] = race["bound"]["sum_seconds"] / median(seconds)
        figures["of_overlap_bound"] = race["bound"]["overlap_seconds"] / median(seconds)
    return figures


def summary(race: Race) -> list[dict[str, Any]]:
    """Figures of each engine, the fastest first, those without a time last; `load` includes the warm-up."""
    names = dict.fromkeys(record["engine"] for record in race["runs"])
    found = [_figures(race, name, [record for record in race["runs"] if record["engine"] == name]) for name in names]
    ours = next((figures["median_seconds"] for figures in found
                 if figures["engine"] == "ours" and "median_seconds" in figures), None)
    for figures in found:
        if ours is not None and "median_seconds" in figures:
            figures["ours_over_it"] = figures["median_seconds"] / ours
    return sorted(found, key=lambda figures: (figures.get("median_seconds", float("inf")), figures["engine"]))


def _cells(figures: Mapping[str, Any]) -> list[str]:
    if "median_seconds" not in figures:
        return [figures["engine"], "0", *["-"] * 8, ", ".join(figures["others_outcomes"])]

    def optional(key: str, form: str) -> str:
        return format(figures[key], form) if key in figures else "-"

    return [figures["engine"] + (" (disturbed)" if figures["disturbed"] else ""), str(figures["runs"]),
            f"{figures['median_seconds']:.1f}", f"{figures['least_seconds']:.1f}-{figures['most_seconds']:.1f}",
            f"{figures['output_tokens_per_second']:.0f}", f"{figures['load_seconds']:.1f}",
            f"{figures['with_load_seconds']:.1f}", f"{figures['peak_rss_gib']:.1f}",
            f"{100 * figures['others_share']:.1f}", optional("of_bound", ".2f"), optional("ours_over_it", ".2f")]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{' --- |' * len(_HEAD)}"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def _bound_line(race: Race) -> str:
    best, bound = race["roofline"]["best"], race["bound"]
    return (f"Bound {bound['sum_seconds']:.1f} s: products {bound['compute_seconds']:.1f} at {best['flops'] / 1e9:.0f} "
            f"GFLOP/s, weights {bound['read_seconds']:.1f} at {best['read'] / 1e9:.1f} GB/s in {bound['steps']} steps, "
            f"attention {bound['attention_seconds']:.1f}; with both at once {bound['overlap_seconds']:.1f} s.")


def _notes(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Greedy agreement with our first run, for information; outcomes other than a clean run."""
    for figures in found:
        if figures.get("agreement") and figures["engine"] != "ours":
            same = figures["agreement"]
            yield (f"{figures['engine']}: {100 * same['equal_rows']:.0f} % of rows have our ids, "
                   f"{same['mean_common_prefix']:.1f} first ids in common on average.")
    outcomes = {figures["engine"]: figures["others_outcomes"] for figures in found if figures["others_outcomes"]}
    if outcomes:
        yield "Other outcomes: " + "; ".join(f"{name}: {', '.join(what)}" for name, what in outcomes.items()) + "."


def lines_of(race: Race) -> Iterator[str]:
    """Markdown of one race."""
    workload, machine, settings = race["workload"], race["machine"], race["settings"]
    yield f"### {workload['name']}"
    yield ""
    yield (f"{workload['rows']} rows, {workload['prompt_tokens']} prompt tokens ({workload['shared_prefix']} shared), "
           f"{workload['output_tokens']} output tokens, at most {settings['active_rows']} rows at once.  "
           f"{machine['cpu']}, {settings['threads']} threads, {machine['memory_gib']} GiB, our path "
           f"{machine.get('path', '-')}, {machine['date']}.")
    if "bound" in race:
        yield _bound_line(race)
    yield ""
    found = summary(race)
    yield from _table([_cells(figures) for figures in found])
    yield ""
    yield from _notes(found)


def markdown(races: Sequence[Race]) -> str:
    """All tables, and the versions of the engines."""
    versions: dict[str, str] = {}
    for race in races:
        for figures in summary(race):
            facts = figures.get("facts", {})
            words = [f"{key} {facts[key]}" for key in ("openvino_genai", "vllm", "llama_cpp", "transformers", "torch")
                     if key in facts]
            if words:
                versions.setdefault(figures["engine"], ", ".join(words))
    text = "\n".join(line for race in races for line in (*lines_of(race), ""))
    listed = "\n".join(f"- {name}: {words}" for name, words in versions.items())
    return f"{text}\n{listed}\n" if listed else f"{text}\n"
