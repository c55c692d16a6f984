"""What a worker's error means for the launcher.

Owns the reading of the text that Beam makes of it: exceptions do not cross processes as objects.
"""

from __future__ import annotations

import re

from batchgen_beam import errors
from batchgen_beam.errors import UserError

__all__ = ["user_error_in"]

_RAISED = re.compile(rf"\b{re.escape(errors.__name__)}\.(\w+): (.+?)(?: \[while running .*\])?$", re.MULTILINE)


def user_error_in(error: BaseException) -> UserError | None:
    """The user's mistake that a worker met, where the last of our errors in the text is one."""
    found = _RAISED.findall(str(error))
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, UserError) else None
