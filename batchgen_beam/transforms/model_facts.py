"""A model without its weights: the small files that a launcher needs of a model which only the workers have.

Owns the folder's form: copies of the model's small files, and one file that says what its weights are.  Does not know
what the files mean.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from batchgen_beam.config.json_files import read_object
from batchgen_beam.errors import OptionError
from batchgen_beam.transforms.model_download import SMALL_FILES
from batchgen_beam.weights.identity import weights_identity

__all__ = ["FACTS_FILE", "read_weights_identity", "write_facts"]

FACTS_FILE = "model-facts.json"
_VERSION = 1


def write_facts(model: Path, folder: Path) -> None:
    """Write the facts of a model folder; an `OptionError` where `folder` has files already or can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise OptionError(f"--write-facts={folder} is not empty; name a new folder")
        for path in sorted(model.iterdir()):
            if path.name.endswith(SMALL_FILES) and path.is_file():
                shutil.copyfile(path, folder / path.name)
        facts = {"version": _VERSION, "weights": weights_identity(model)}
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--write-facts={folder} can't be written: {error.strerror or error}") from error


def read_weights_identity(folder: Path) -> str:
    """What a folder of facts says about the weights; refuses what `write_facts` did not make."""
    if not (folder / FACTS_FILE).is_file():
        raise OptionError(f"--model-facts={folder} is no folder with {FACTS_FILE}; `batchgen-beam inspect MODEL "
                          "--write-facts FOLDER` makes one where the model is")
    source = read_object(folder / FACTS_FILE)
    weights: str | None = source.read("weights", str)
    if source.read("version", int) != _VERSION or not weights:
        raise OptionError(f"--model-facts={folder} was made by another version; make it again")
    return weights
