"""The commands of the README: those that CI runs, and those that are marked as not run there.

A block that begins with ```bash is run by CI, line by line.  A block of other commands is a ```console one, and its
paragraph says "not run by CI".

    python tests/readme_commands.py          prints the commands that CI runs, one a line
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
FENCE = re.compile(r"(?P<before>[^\n]*)\n+```(?P<kind>\w*)\n(?P<body>.*?)\n```", re.S)


def blocks(text: str, kind: str) -> Iterator[tuple[str, str]]:
    """(Line before, body) of each fenced block of a kind."""
    for match in FENCE.finditer(text):
        if match["kind"] == kind:
            yield match["before"], match["body"]


def commands(text: str, kind: str = "bash") -> list[str]:
    """Command lines of all blocks of a kind; a backslash continues a line, a comment is none."""
    joined = "\n".join(body for _, body in blocks(text, kind)).replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*$", "", re.sub(r" {2,}", " ", line)).strip() for line in joined.split("\n"))
    return [line for line in lines if line and not line.startswith("#")]


if __name__ == "__main__":
    print("\n".join(commands(README.read_text(encoding="utf-8"))))
