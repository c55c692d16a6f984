"""The row boundary: what goes wrong with one row stays with that row.

Owns the turning of an exception into the row's `Failure`, for every step that works on one row at a time.  Does not
know what the work is.  One of the two places in the package that catch everything; the other is the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from batchgen_beam.errors import ErrorCode, FatalError, RowError
from batchgen_beam.records import Failure, RowKey

__all__ = ["at_row_boundary"]

LOG = logging.getLogger(__name__)

Result = TypeVar("Result")


def at_row_boundary(key: RowKey, work: Callable[[], Result], head: Callable[[], str]) -> Result | Failure:
    """What `work` gives, or the row's failure; `head` gives the beginning of its prompt.

    A `RowError` keeps its code.  Any other surprise is logged with its traceback and becomes `ENGINE_ERROR`, also the
    panics of native tokenizers, which are no `Exception`s.  What concerns more than the row is raised again.
    """
    try:
        return work()
    except RowError as error:
        return Failure(key=key, code=error.code, message=error.message, prompt_head=head())
    except (MemoryError, FatalError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        LOG.exception("row %r met an unexpected error and fails alone", key.uuid)
        return Failure(key=key, code=ErrorCode.ENGINE_ERROR, message=f"unexpected {type(error).__name__}: {error}",
                       prompt_head=head())
