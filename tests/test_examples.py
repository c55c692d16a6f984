"""The demo's input: what is committed is what the script makes, and it holds what the README says."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.package_sources import ROOT

FOLDER = ROOT / "examples"
SHARDS = sorted(FOLDER.glob("*.parquet"))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    """All rows in order."""
    return [row for shard in SHARDS for row in pq.read_table(shard).to_pylist()]


def test_committed_shards_are_what_the_script_makes(tmp_path: Path) -> None:
    """Running the script again writes equal files, row group by row group."""
    runpy.run_path(str(FOLDER / "make_examples.py"))["main"](tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [shard.name for shard in SHARDS]
    for shard in SHARDS:
        committed, made = pq.ParquetFile(shard), pq.ParquetFile(tmp_path / shard.name)
        assert committed.schema_arrow.equals(made.schema_arrow), shard.name
        assert committed.num_row_groups == made.num_row_groups == 2
        for group in range(2):
            assert committed.read_row_group(group).equals(made.read_row_group(group)), (shard.name, group)


def test_three_shards_with_sixty_rows_and_one_id_twice(rows: list[dict[str, object]]) -> None:
    """60 rows, 59 ids; the two rows that share an id ask different questions."""
    counts = Counter(row["uuid"] for row in rows)
    assert (len(SHARDS), len(rows), sorted(counts.values())[-2:]) == (3, 60, [1, 2])
    (twice,) = [uuid for uuid, count in counts.items() if count == 2]
    assert len({row["prompt"] for row in rows if row["uuid"] == twice}) == 2


def test_six_rows_are_bad(rows: list[dict[str, object]]) -> None:
    """One row for each way to be bad: it is named in its ticket and nowhere else."""
    bad = {str(row["ticket_id"]): row for row in rows if str(row["ticket_id"]).startswith("bad-")}
    assert sorted(bad) == ["bad-empty", "bad-no-turns", "bad-nothing", "bad-surrogate", "bad-temperature",
                           "bad-too-long"]
    assert bad["bad-empty"]["prompt"] == ""
    assert len(str(bad["bad-too-long"]["prompt"])) > 6 * 8192
    assert not isinstance(json.loads(str(bad["bad-no-turns"]["messages"])), list)
    assert r"\ud83d" in str(bad["bad-surrogate"]["messages"])
    assert bad["bad-temperature"]["temperature"] == -1.0
    assert bad["bad-nothing"]["prompt"] is bad["bad-nothing"]["messages"] is None


def test_answers_are_short(rows: list[dict[str, object]]) -> None:
    """The demo stays a matter of a minute on two cores: few tokens are asked for, and the shards are small."""
    assert max(int(str(row["max_tokens"])) for row in rows) <= 48
    assert sum(shard.stat().st_size for shard in SHARDS) < 64 * 1024


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "name an output folder"),
    (["{folder}/absent"], "absent holds no results and no failures"),
    (["{folder}/out", "ticket"], "the results have no column ticket; they have uuid, finish_reason, text"),
])
def test_show_results_says_what_is_wrong(arguments: list[str], says: str, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in its command ends with 2 and one line."""
    folder = tmp_path / "out" / "results" / "a.parquet"
    folder.mkdir(parents=True)
    table = pa.table({"uuid": ["a"], "finish_reason": ["stop"], "text": ["b"]})
    pq.write_table(table, folder / "rg-000000-s-0000.parquet")
    monkeypatch.setattr(sys, "argv", ["show_results.py", *[word.format(folder=tmp_path) for word in arguments]])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / "show_results.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert says in printed.err
