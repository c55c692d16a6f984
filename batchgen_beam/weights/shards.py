"""Which files of a folder hold the weights, and which tensors are in them.

Owns the choice between an index and a single file, and the agreement of both ways between index and files.  Does not
know models, names of parameters or torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from batchgen_beam.config.json_files import parse_object
from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.headers import TensorFacts, read_header

__all__ = ["clip_names", "find_shards", "read_tensors"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_NAMES_SHOWN = 6


def clip_names(names: Iterable[str]) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def find_shards(folder: Path) -> list[Path]:
    """The weight files in order of name.  With an index, exactly the files that it names; others are not looked at."""
    if (folder / _INDEX).is_file():
        return _named_files(folder, _read_index(folder / _INDEX).values())
    found = sorted(folder.glob("*.safetensors"))
    if folder / _SINGLE in found:
        return [folder / _SINGLE]
    if len(found) == 1 and "-of-" not in found[0].name:
        return found
    if found:
        raise CheckpointError(f"{folder} holds {clip_names(p.name for p in found)} but no {_INDEX}, so that a missing "
                              "part would go unseen; fetch the index")
    raise CheckpointError(_why_no_weights(folder))


def _named_files(folder: Path, names: Iterable[str]) -> list[Path]:
    files = [folder / name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} of the {len(files)} files named in {_INDEX}: "
                              f"{clip_names(missing)}; fetch them again")
    return files


def _why_no_weights(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (f"{folder} holds only pickled weights ({clip_names(pickles)}); pickles can run code and are never "
                "read: convert them to safetensors")
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"{folder} holds GGUF files ({clip_names(ggufs)}); name the file itself as the model"
    return f"{folder} holds no safetensors file (it has {clip_names(names) or 'nothing'})"


def _read_index(path: Path) -> dict[str, str]:
    weight_map = parse_object(path.read_bytes(), str(path)).child("weight_map")
    files = {} if weight_map is None else dict(weight_map.values)
    names = {name: file for name, file in files.items() if isinstance(file, str) and file == Path(file).name}
    if not names or names != files:
        raise CheckpointError(f"{path} must map tensor names to names of files beside it")
    return names


def read_tensors(folder: Path) -> dict[str, TensorFacts]:
    """Every stored tensor by name.  Index and files have to agree both ways; no name may be stored twice."""
    tensors: dict[str, TensorFacts] = {}
    for file in find_shards(folder):
        header = read_header(file)
        twice = header.keys() & tensors.keys()
        if twice:
            raise CheckpointError(f"{file} holds tensors that another file holds too: {clip_names(twice)}")
        tensors |= header
    index = folder / _INDEX
    if index.is_file():
        _check_index(index, _read_index(index), tensors)
    return tensors


def _check_index(path: Path, index: dict[str, str], tensors: dict[str, TensorFacts]) -> None:
    absent = [f"{name} ({file})" for name, file in index.items()
              if name not in tensors or tensors[name].file.name != file]
    if absent:
        raise CheckpointError(f"{path} names tensors that their file does not hold: {clip_names(absent)}")
    unnamed = tensors.keys() - index.keys()
    if unnamed:
        raise CheckpointError(f"{path} does not name tensors that the files hold: {clip_names(unnamed)}")
