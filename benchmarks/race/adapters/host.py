"""Run one adapter on one job: load, warm up, answer all rows, write the result.

    python host.py ADAPTER.py JOB.json

An adapter is one file that needs nothing but the standard library and its engine.  It has `load(job) -> engine`, and
the engine has `generate(rows) -> ids per row`, `facts() -> dict` and `close()`.  Moments are seconds of the machine's
monotonic clock, which all processes share.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any


def load_adapter(path: Path) -> Any:
    """The adapter's module, under its file's name."""
    spec = importlib.util.spec_from_file_location(f"race_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(adapter: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The result: moments, ids of every row in the order of the job, and what the engine says about itself."""
    engine = adapter.load(job)
    try:
        moments = {"ready": time.monotonic()}
        engine.generate(job["warmup"])
        moments["warm"] = moments["started"] = time.monotonic()
        ids = engine.generate(job["rows"])
        moments["ended"] = time.monotonic()
        return {"moments": moments, "ids": [[int(token) for token in row] for row in ids], "facts": engine.facts()}
    finally:
        engine.close()


def main() -> None:
    """Write the result beside its place first, so that a result that is there is whole."""
    job = json.loads(Path(sys.argv[2]).read_text())
    result = run(load_adapter(Path(sys.argv[1])), job)
    place = Path(job["result"])
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(place)


if __name__ == "__main__":
    main()
