"""Bars of batch completion time, one panel for each workload, from a summary file; runs in an environment of its own.

    python chart.py SUMMARY.json PICTURE.png

The summary is a list of {"title": ..., "bound": seconds or null, "bars": [{"engine", "median", "least", "most"}]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt


def panel(axes: Any, race: dict[str, Any]) -> None:
    """Medians with least and most as error bars; the bound as a line."""
    bars = race["bars"][::-1]
    medians = [bar["median"] for bar in bars]
    errors = [[bar["median"] - bar["least"] for bar in bars], [bar["most"] - bar["median"] for bar in bars]]
    colours = ["tab:orange" if bar["engine"].split(":")[0] == "ours" else "tab:blue" for bar in bars]
    drawn = axes.barh([bar["engine"] for bar in bars], medians, xerr=errors, color=colours, capsize=3)
    axes.bar_label(drawn, labels=[f"{value:.1f}" for value in medians], padding=6, fontsize=8)
    if race["bound"] is not None:
        axes.axvline(race["bound"], color="black", linestyle="--", linewidth=1, label="bound of the machine")
        axes.legend(fontsize=8, loc="upper right")
    axes.set_title(race["title"], fontsize=10)
    axes.set_xlabel("seconds to the last answer (median; bars from least to most)", fontsize=8)
    axes.set_xlim(0, 1.15 * max(bar["most"] for bar in bars))


def main() -> None:
    """Draw the picture."""
    races = [race for race in json.loads(Path(sys.argv[1]).read_text()) if race["bars"]]
    if not races:
        raise SystemExit("no engine has a time: nothing to draw")
    height = sum(1.2 + 0.35 * len(race["bars"]) for race in races)
    figure, all_axes = plt.subplots(len(races), 1, figsize=(8, height), squeeze=False, layout="constrained",
                                    height_ratios=[1.2 + 0.35 * len(race["bars"]) for race in races])
    for axes, race in zip(all_axes[:, 0], races, strict=True):
        panel(axes, race)
    figure.savefig(sys.argv[2], dpi=150)


if __name__ == "__main__":
    main()
