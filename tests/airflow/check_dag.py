"""Run by Airflow's own Python: parses the DAG as Airflow does, runs its operator, prints one JSON object.

    python tests/airflow/check_dag.py FOLDER COMMAND FLAGS...

FOLDER holds the DAG file.  For each FLAGS the operator runs `COMMAND run FLAGS`; an exception becomes its class name.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from airflow.dag_processing.dagbag import DagBag


def outcome(operator: Any) -> int | str:
    """The task's value, or the kind of its failure."""
    try:
        value: int = operator.execute({})
    except Exception as error:  # noqa: BLE001 - whatever it is, it is printed
        return type(error).__name__
    return value


def main(folder: Path, command: str, *runs: str) -> dict[str, Any]:
    """The facts."""
    bag = DagBag(dag_folder=str(folder))
    dag = bag.dags["batchgen_daily"]
    (task,) = dag.tasks
    path = folder / "batchgen_daily.py"
    spec = importlib.util.spec_from_file_location("batchgen_daily", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        "import_errors": {Path(name).name: text for name, text in bag.import_errors.items()},
        "task": [type(task).__name__, task.task_id, task.retries],
        "catchup": dag.catchup, "max_active_runs": dag.max_active_runs,
        "outcomes": [outcome(module.BatchgenRun(task_id=f"run_{index}", flags=flags, command=command))
                     for index, flags in enumerate(runs)],
    }


if __name__ == "__main__":
    print("FACTS " + json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))  # noqa: T201
