"""Laws of reading workers' errors: a user's mistake stays one, whatever process met it."""

from __future__ import annotations

import pytest

from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.pipelines.worker_faults import user_error_in

TRACE = """Traceback (most recent call last):
  File "sdk_worker.py", line 3, in _execute
batchgen_beam.errors.{}: {} [while running 'Generate/GenerateLane']
"""


@pytest.mark.parametrize("kind", [OptionError, CheckpointError])
def test_a_mistake_that_a_worker_met_is_the_users(kind: type[Exception]) -> None:
    """With its message, without what the runner adds."""
    found = user_error_in(RuntimeError(TRACE.format(kind.__name__, "--kv-memory is 99; raise it")))
    assert type(found) is kind
    assert str(found) == "--kv-memory is 99; raise it"


@pytest.mark.parametrize("text", [
    "", "ValueError: odd", TRACE.format("EngineError", "the engine stopped"), TRACE.format("NoSuchError", "x"),
    TRACE.format("OptionError", "x") + TRACE.format("EngineError", "the engine stopped")])
def test_other_errors_stay_what_they_are(text: str) -> None:
    """Faults, and mistakes that led to a fault."""
    assert user_error_in(RuntimeError(text)) is None
