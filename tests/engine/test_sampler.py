"""Laws of the random streams: one per row, with no relation to its neighbours.  Those of sampling are kernel tests."""

from __future__ import annotations

import numpy as np
import pytest

from batchgen_beam.engine.sampler import stream_key, uniform


def test_neighbouring_streams_and_positions_are_not_related() -> None:
    """100 streams at 100 positions: each line and each column is uniform, and neighbours do not correlate.

    Bounds are five deviations of 10,000 independent numbers: the mean of the grid errs by 1 / sqrt(12 * 10^4) = 0.0029,
    a correlation by 0.01.
    """
    streams = np.array([stream_key(7, f"row-{i}", 0) for i in range(100)], np.uint64)
    grid = uniform(np.repeat(streams, 100), np.tile(np.arange(100), 100)).reshape(100, 100)
    assert ((grid >= 0) & (grid < 1)).all()
    assert abs(grid.mean() - 0.5) < 5 * 0.0029
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 * 0.01


def test_the_draw_is_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as published with its reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = uniform(np.full(4, 1234567, np.uint64), np.arange(4))
    assert found.tolist() == [(number >> 11) * 2.0**-53 for number in published]


@pytest.mark.parametrize("other", [(1, "b", 0), (2, "a", 0), (1, "a", 1), (-1, "a", 0), (2**64 - 1, "a", 0)])
def test_a_stream_is_named_by_seed_row_and_choice(other: tuple[int, str, int]) -> None:
    """Each part of the name counts; -1 and 2^64 - 1 are different seeds; keys of any characters have a stream."""
    assert stream_key(*other) != stream_key(1, "a", 0)
    assert 0 <= stream_key(other[0], "\ud800\x1f", 0) < 2**64
