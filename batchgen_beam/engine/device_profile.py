"""A device as its data sheet describes it: rates and memory, from a file.

Owns the file's form and the profiles that come with the package.  Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from batchgen_beam.config.json_files import parse_object
from batchgen_beam.config.reading import JsonObject, read_fields
from batchgen_beam.errors import CheckpointError, OptionError

__all__ = ["DeviceProfile", "load_profile", "profile_names"]

_FOLDER = files("batchgen_beam") / "engine" / "profiles"
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device: FLOP/s of dense bfloat16 products, bytes/s of its memory and its links, bytes of memory.

    `to_device` and `to_host` are the host link in each direction, `disk` what a host reads.  `source` says where the
    figures are from, `assumed` what of them is in no data sheet.
    """

    name: str
    source: str
    assumed: str = ""
    flops: float
    memory_bandwidth: float
    memory: int
    to_device: float
    to_host: float
    between_devices: float
    disk: float

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bandwidth", "to_device", "to_host", "between_devices", "disk"):
            if getattr(self, name) <= 0:
                raise CheckpointError(f"{name} must be over 0, got {getattr(self, name)}")


def profile_names() -> tuple[str, ...]:
    """The profiles that come with the package."""
    names = [entry.name for entry in _FOLDER.iterdir()]
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def load_profile(name: str) -> DeviceProfile:
    """A profile of the package by name, or one from a file; `OptionError` names what is wrong with it."""
    if name in profile_names():
        return _parse(parse_object((_FOLDER / f"{name}{_SUFFIX}").read_bytes(), name))
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise OptionError(f"--device-profile={name} is neither a file that can be read nor one of "
                          f"{', '.join(profile_names())}") from error
    return _parse(parse_object(data, name))


def _parse(source: JsonObject) -> DeviceProfile:
    try:
        return DeviceProfile(**read_fields(DeviceProfile, source))
    except TypeError as error:
        raise OptionError(f"--device-profile: {source.where}: {str(error).partition('() ')[2]}") from None
    except CheckpointError as error:
        raise OptionError(f"--device-profile: {error}") from None
