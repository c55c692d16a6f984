"""What the stores' clients raise when they fail, and which failures may pass.

Owns the list of those errors: Beam and fsspec hand on what their clients raise, and not all of that is an `OSError`.
Does not know what was being done.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator

from apache_beam.io.filesystem import BeamIOError

__all__ = ["may_pass", "store_errors"]

_CLIENT_ERRORS = {
    "aiohttp.client_exceptions": ("ClientError",),
    "apache_beam.io.aws.clients.s3.messages": ("S3ClientError",),
    "azure.core.exceptions": ("AzureError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.api_core.exceptions": ("GoogleAPIError",),
    "google.auth.exceptions": ("GoogleAuthError",),
    "hdfs.util": ("HdfsError",),
    "httpx": ("HTTPError",),
    "httpx2": ("HTTPError",),
}
"""Module -> errors that are no `OSError`.  Whoever raises one has imported its module."""

_LASTING = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EISDIR,
    errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENAMETOOLONG})
_LASTING_STATUS = frozenset({400, 401, 403, 404, 405, 412})
"""HTTP status of requests that fail again: the request, its credentials or its target are wrong."""


def store_errors() -> tuple[type[Exception], ...]:
    """What to catch around Beam's and fsspec's file systems; to be called in the `except` clause."""
    loaded = ((sys.modules[module], names) for module, names in _CLIENT_ERRORS.items() if module in sys.modules)
    return (OSError, *(getattr(module, name) for module, names in loaded for name in names))


def may_pass(error: BaseException) -> bool:
    """Whether the same operation may succeed a moment later: not with a full disk or without permission."""
    return not any(
        (isinstance(cause, OSError) and cause.errno in _LASTING) or getattr(cause, "code", None) in _LASTING_STATUS
        for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what Beam has wrapped in it: errors as arguments, or one for each path."""
    yield error
    details = (error.exception_details or {}) if isinstance(error, BeamIOError) else {}
    for inner in (*error.args, *details.values()):
        if isinstance(inner, BaseException):
            yield from _causes(inner)
