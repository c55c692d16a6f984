"""A shuffle of very many small values."""

from __future__ import annotations

from collections.abc import Iterable

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from batchgen_beam.storage.units import Placement
from batchgen_beam.transforms import exchange
from batchgen_beam.transforms.exchange import GroupParcels, PackChunks, SplitBucket, bucket_count
from batchgen_beam.transforms.wire import unpack
from tests.support.storing import local_pipeline


def places(count: int, unit: str) -> list[tuple[str, Placement]]:
    """Values under 50 keys."""
    return [(f"key-{index % 50}", Placement(unit, index, 0, 0)) for index in range(count)]


def rows_by_unit(group: tuple[str, Iterable[bytes]]) -> tuple[str, list[tuple[str, int]]]:
    """What came together."""
    return group[0], sorted((place.unit, place.row) for place in map(unpack, group[1]))


@pytest.mark.parametrize("buckets", [None, 1, 7])
def test_values_meet_under_their_key(buckets: int | None) -> None:
    """Whatever the buckets, each key arrives once, with all values of all collections."""
    inputs = {"a": places(200, "a"), "b": places(90, "b")}
    wanted = [
        (f"key-{key}", [(unit, index) for unit, values in inputs.items() for index in range(key, len(values), 50)])
        for key in range(50)]
    with local_pipeline() as pipeline:
        sides = tuple(pipeline | name >> beam.Create(values) for name, values in inputs.items())
        grouped = sides | GroupParcels(buckets=buckets) | beam.Map(rows_by_unit)
        assert_that(grouped, equal_to(wanted))


def test_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is sent when it is full, all buckets when the bundle holds too much, and nothing is lost at its end."""
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 2_000)
    monkeypatch.setattr(exchange, "BUNDLE_BYTES", 20_000)
    step = PackChunks(buckets=1 << 10)
    step.start_bundle()
    sent = [chunk for keyed in places(1000, "a") for chunk in step.process(keyed)]
    assert 10 < len(sent) < 500
    sent += [value.value for value in step.finish_bundle()]
    split = [group for bucket, chunk in sent for group in SplitBucket().process((bucket, [chunk]))]
    assert sorted(unpack(value).row for _, values in split for value in values) == list(range(1000))


def test_buckets_follow_the_rows() -> None:
    """About a thousand rows a bucket, between one bucket and a limit; a fixed number where rows are unknown."""
    assert [bucket_count(rows) for rows in (0, 999, 200_000, 10**9, None)] == [1, 1, 200, 1 << 14, 1 << 10]
