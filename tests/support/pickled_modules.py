"""Which modules of this repository Beam would pickle references to, for a command that is run as the console runs it.

    python -m tests.support.pickled_modules run --input=...

Runs the command until it starts the pipeline.  Prints one JSON object: `job`, the modules of our own files in the DoFns
and coders of the graph, and `strays`, what the same search finds for classes that are in the wrong place.
"""

from __future__ import annotations

import base64
import bz2
import io
import json
import pickle
import runpy
import sys
import zlib
from pathlib import Path
from typing import Any, NoReturn

import apache_beam as beam
from apache_beam.internal import pickler
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import beam_runner_api_pb2

ROOT = Path(__file__).resolve().parents[2]

COMBINES = (common_urns.composites.COMBINE_PER_KEY.urn, common_urns.composites.COMBINE_GLOBALLY.urn,
            common_urns.combine_components.COMBINE_GROUPED_VALUES.urn)


class Stray(beam.DoFn):
    """A step that lives in the started script."""


class Recorder(pickle.Unpickler):
    """Remembers the modules whose names it looks up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


def modules_in(pickled: bytes) -> set[str]:
    """Modules of our own files that a pickle of Beam refers to; `__main__` where a class of it is copied in.

    Beam compresses with bz2, and coders with zlib behind their name and `$`.
    """
    packed = base64.b64decode(pickled.rpartition(b"$")[2])
    plain = bz2.decompress(packed) if packed.startswith(b"BZh") else zlib.decompress(packed)
    recorder = Recorder(plain)
    recorder.load()
    ours = {name for name in recorder.modules if is_ours(getattr(sys.modules[name], "__file__", None))}
    return ours | ({"__main__"} if b"__main__" in plain else set())


def is_ours(file: str | None) -> bool:
    """Whether it is a file of this repository, and not of an environment inside it."""
    return file is not None and Path(file).is_relative_to(ROOT) and "site-packages" not in file


def pickles(pipeline: beam.Pipeline) -> list[bytes]:
    """Every pickled DoFn, combiner and coder of the graph."""
    components = pipeline.to_runner_api().components
    steps = [transform.spec for transform in components.transforms.values()]
    functions = [beam_runner_api_pb2.ParDoPayload.FromString(spec.payload).do_fn
                 for spec in steps if spec.urn == common_urns.primitives.PAR_DO.urn]
    combiners = [beam_runner_api_pb2.CombinePayload.FromString(spec.payload).combine_fn
                 for spec in steps if spec.urn in COMBINES]
    coders = [coder.spec for coder in components.coders.values()]
    pickled = (python_urns.PICKLED_DOFN_INFO, python_urns.PICKLED_CODER, python_urns.PICKLED_COMBINE_FN)
    return [spec.payload for spec in (*functions, *combiners, *coders) if spec.urn in pickled]


class Started(BaseException):
    """The pipeline would start now."""


def collect(pipeline: beam.Pipeline) -> NoReturn:
    """In place of `Pipeline.run`."""
    raise Started({name for data in pickles(pipeline) for name in modules_in(data)})


if __name__ == "__main__":
    beam.Pipeline.run = collect
    try:
        runpy.run_module("batchgen_beam.pipelines.main", run_name="__main__", alter_sys=True)
    except Started as started:
        (job,) = started.args
    from pipelines.options import BatchgenOptions  # noqa: TID251 - the wrong name on purpose

    strays = modules_in(pickler.dumps(Stray())) | modules_in(pickler.dumps(BatchgenOptions))
    print(json.dumps({"job": sorted(job), "strays": sorted(strays)}))  # noqa: T201
