"""What a run will read: patterns to files, checked before anything starts.

Owns the choice of reader by extension, the limit on rows, and the messages about unsuitable input.  Does not know
Beam's transforms, nor what columns mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from batchgen_beam.errors import InputError
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.files import check_file, check_store, list_files, normalise_uri, stored_size
from batchgen_beam.storage.jsonl_input import LINE_EXTENSIONS, count_lines, read_lines
from batchgen_beam.storage.kept_columns import kept_types
from batchgen_beam.storage.parquet_input import ParquetFooter, read_footer, read_row_group
from batchgen_beam.storage.raw_rows import RawBatch
from batchgen_beam.storage.schemas import check_kept_names
from batchgen_beam.storage.units import check_distinct_paths

__all__ = ["ROW_GROUP_BYTES", "InputFile", "InputPlan", "ReadTask", "pieces_over", "plan_input", "read_task",
           "split_plan"]

ROW_GROUP_BYTES = 512 << 20
"""Row groups whose needed columns are larger than this, uncompressed, draw a warning: each is read by one worker."""

LINE_BYTES = 512
"""What a line is taken to have, as stored, where nobody has counted them."""

_PARQUET = (".parquet", ".parq", ".pq")


@dataclass(frozen=True, slots=True)
class ReadTask:
    """One row group (0 of a JSONL file) and how many of its rows are wanted (None: all)."""

    uri: str
    row_group: int
    rows: int | None


@dataclass(frozen=True, slots=True)
class InputFile:
    """A shard.  `rows` holds the rows wanted of each row group; None: a JSONL file of `size` bytes, all its lines."""

    uri: str
    rows: tuple[int, ...] | None
    size: int = 0

    def tasks(self) -> Iterator[ReadTask]:
        """Its row groups that hold rows."""
        if self.rows is None:
            yield ReadTask(self.uri, 0, None)
            return
        for row_group, rows in enumerate(self.rows):
            if rows:
                yield ReadTask(self.uri, row_group, rows)

    def only(self, row_groups: Collection[int]) -> InputFile:
        """The same file with the rows of these row groups alone."""
        if self.rows is None:
            return self
        return replace(self, rows=tuple(rows if index in row_groups else 0 for index, rows in enumerate(self.rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """The files in order, the types of the kept columns, the total of rows where it is known, and warnings.

    `columns`: every name that a Parquet file has for a column.
    """

    files: tuple[InputFile, ...]
    kept: pa.Schema
    columns: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()

    @property
    def rows(self) -> int | None:
        """All rows, or None where a JSONL file has not been counted."""
        total = 0
        for file in self.files:
            if file.rows is None:
                return None
            total += sum(file.rows)
        return total


def split_plan(plan: InputPlan, rows: int) -> list[InputPlan]:
    """The same input in order, in parts of at most `rows` rows where no row group has more."""
    parts: list[dict[str, set[int]]] = []
    room = 0
    for file in plan.files:
        for task in file.tasks():
            count = _rows_of(file, task)
            if not parts or count > room:
                parts.append({})
                room = rows
            parts[-1].setdefault(file.uri, set()).add(task.row_group)
            room -= count
    files = {file.uri: file for file in plan.files}
    return [replace(plan, files=tuple(files[uri].only(groups) for uri, groups in part.items())) for part in parts]


def pieces_over(plan: InputPlan, rows: int) -> list[tuple[str, int]]:
    """(URI, about how many rows) of JSONL files and row groups of more than `rows`: nobody takes them in parts."""
    counted = [(file.uri, _rows_of(file, task)) for file in plan.files for task in file.tasks()]
    return [(uri, count) for uri, count in counted if count > rows]


def _rows_of(file: InputFile, task: ReadTask) -> int:
    return file.size // LINE_BYTES if task.rows is None else task.rows


def plan_input(patterns: Sequence[str], columns: InputColumns, *, output: str | None = None,
               limit: int | None = None, row_group_bytes: int = ROW_GROUP_BYTES) -> InputPlan:
    """Match the patterns and check every footer.

    An `InputError` names the pattern that matches nothing or whose store can't be used here, or the file and what is
    wrong with it, such as that it lies inside `output`.  `limit` keeps the first rows only, files sorted by name.
    """
    check_kept_names(columns.keep)
    uris = _matched(patterns)
    if output is not None:
        _check_outside(uris, output)
    check_distinct_paths(uris)
    footers = {uri: read_footer(uri, columns) for uri in uris if _is_parquet(uri)}
    schemas = [(uri, footers[uri].schema if uri in footers else _text_schema(columns.keep)) for uri in uris]
    files = tuple(InputFile(uri, footers[uri].rows) if uri in footers else InputFile(uri, None, stored_size(uri))
                  for uri in uris)
    return InputPlan(
        files=files if limit is None else tuple(_limited(files, limit)),
        kept=kept_types(schemas, columns.keep),
        columns=frozenset(name for footer in footers.values() for name in footer.schema.names),
        warnings=tuple(_warnings(footers, row_group_bytes)))


def _matched(patterns: Sequence[str]) -> list[str]:
    uris: set[str] = set()
    for pattern in patterns:
        check_store(pattern, InputError)
        found = [uri for uri in list_files(pattern) if not uri.rpartition("/")[2].startswith((".", "_"))]
        if not found:
            raise InputError(f"input {pattern!r} matches no file (names that begin with '.' or '_' do not count)")
        uris.update(found)
    for uri in sorted(uris):
        _check_extension(uri)
        check_file(uri, InputError)
    return sorted(uris)


def _check_outside(uris: Sequence[str], output: str) -> None:
    """Answers must not be the next run's questions."""
    inside = f"{normalise_uri(output).rstrip('/')}/"
    for uri in uris:
        if uri.startswith(inside):
            raise InputError(f"input {uri} lies inside --output {output}; choose an --output outside the input, "
                             "or an --input pattern that does not reach into it")


def _is_parquet(uri: str) -> bool:
    return uri.lower().endswith(_PARQUET)


def _check_extension(uri: str) -> None:
    if not uri.lower().endswith((*_PARQUET, *LINE_EXTENSIONS)):
        raise InputError(f"input {uri} is neither Parquet ({', '.join(_PARQUET)}) nor JSON Lines "
                         f"({', '.join(LINE_EXTENSIONS)}); name a folder's files by a pattern such as folder/*.parquet")


def _text_schema(keep: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, pa.string()) for name in keep])


def _warnings(footers: dict[str, ParquetFooter], limit: int) -> Iterator[str]:
    for uri, footer in footers.items():
        for row_group, size in enumerate(footer.needed_bytes):
            if size > limit:
                yield (f"{uri}: row group {row_group} holds {footer.rows[row_group]} rows and {size >> 20} MiB in the "
                       f"columns that are read, over {limit >> 20} MiB; one worker reads it alone. "
                       "Smaller row groups spread better")


def _limited(files: Sequence[InputFile], limit: int) -> Iterator[InputFile]:
    left = limit
    for file in files:
        if left == 0:
            return
        rows = (count_lines(file.uri, left),) if file.rows is None else tuple(_first_rows(file.rows, left))
        left -= sum(rows)
        yield replace(file, rows=rows)


def _first_rows(groups: Sequence[int], limit: int) -> Iterator[int]:
    left = limit
    for rows in groups:
        yield min(rows, left)
        left -= min(rows, left)


def read_task(task: ReadTask, columns: InputColumns, kept: pa.Schema) -> Iterator[RawBatch]:
    """The wanted rows of one row group or JSONL file, in order, in small batches."""
    if _is_parquet(task.uri):
        batches = read_row_group(task.uri, task.row_group, columns, kept)
    else:
        batches = read_lines(task.uri, columns, kept)
    return batches if task.rows is None else _first(batches, task.rows)


def _first(batches: Iterator[RawBatch], rows: int) -> Iterator[RawBatch]:
    left = rows
    for batch in batches:
        part = batch.cut(0, left)
        left -= len(part.rows)
        yield part
        if left == 0:
            return
