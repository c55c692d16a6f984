"""Laws of the graph that a runner is given: who needs an accelerator, names of pickled classes, paths in it."""

from __future__ import annotations

import base64
import bz2
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import apache_beam as beam
import fsspec
import pytest
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from batchgen_beam.pipelines.main import USER_ERROR, main
from batchgen_beam.pipelines.options import parse_options
from batchgen_beam.pipelines.placement import ONE_PROCESS, ask_runner
from batchgen_beam.pipelines.runners import pin_runner
from batchgen_beam.settings import WorkerNeeds
from batchgen_beam.storage.files import write_atomically
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.package_sources import PACKAGE, ROOT
from tests.support.jobs import questions, run_flags, write_rows
from tests.support.object_store import bucket
from tests.support.pickled_modules import modules_in, pickles

pytestmark = pytest.mark.timeout(120)

GPU = "type:nvidia-l4;count:1;install-nvidia-driver"
ACCELERATOR = "beam:resources:accelerator:v1"
RAM = "beam:resources:min_ram_bytes:v1"


class Captured(BaseException):
    """The pipeline would start now."""


def graph(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> beam.Pipeline:
    """The pipeline that a command line makes."""
    def capture(pipeline: beam.Pipeline) -> NoReturn:
        raise Captured(pipeline)

    monkeypatch.setattr(beam.Pipeline, "run", capture)
    with pytest.raises(Captured) as captured:
        main(arguments)
    (pipeline,) = captured.value.args
    assert isinstance(pipeline, beam.Pipeline)
    return pipeline


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[beam.Pipeline]:
    """A job on stores: none of its input, output and model is a path of this machine."""
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "a.parquet", questions(5))
    model = write_fake_folder(tmp_path / "fake")
    for file in model.iterdir():
        fsspec.filesystem("memory").pipe(f"/graph/fake/{file.name}", file.read_bytes())
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }}")
    with bucket("graph") as store:
        write_atomically(f"{store.uri}/in/a.parquet", rows.read_bytes())
        flags = run_flags(f"{store.uri}/in/*.parquet", Path("out"), Path("model"), f"--output={store.uri}/out",
                          "--model=memory://graph/fake", "--model-cache=cache", f"--accelerator={GPU}",
                          f"--chat-template={tmp_path / 'mine.jinja'}", "--worker-ram=30GB")
        yield graph(monkeypatch, *flags)


def steps(components: Any) -> dict[str, Any]:
    """Transforms without parts, by their full name."""
    return {transform.unique_name: transform for transform in components.transforms.values()
            if not transform.subtransforms}


def test_only_the_generate_step_asks_for_an_accelerator(pipeline: beam.Pipeline) -> None:
    """Its environment is its own, with accelerator and memory; reading, tokenizing and publishing run anywhere."""
    components = pipeline.to_runner_api(return_context=True)[0].components
    hinted = {name: components.environments[transform.environment_id].resource_hints
              for name, transform in steps(components).items() if transform.environment_id}
    with_hints = {name for name, hints in hinted.items() if hints}
    assert with_hints == {name for name in hinted if "GenerateLane" in name} != set()
    for name in with_hints:
        assert dict(hinted[name]) == {ACCELERATOR: GPU.encode(), RAM: b"30000000000"}


def test_without_flags_no_step_has_hints(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One environment for all: a runner may fuse and place them as it likes."""
    flags = run_flags(write_rows(tmp_path / "a.parquet", questions(5)), tmp_path / "out",
                      write_fake_folder(tmp_path / "fake"))
    components = graph(monkeypatch, *flags).to_runner_api().components
    assert [dict(environment.resource_hints) for environment in components.environments.values()] == [{}]


def test_runners_are_told_of_state_and_timers(pipeline: beam.Pipeline) -> None:
    """A runner that has no state must refuse the job; only the steps of lanes have any."""
    proto = pipeline.to_runner_api(return_context=True)[0]
    assert common_urns.requirements.REQUIRES_STATEFUL_PROCESSING.urn in proto.requirements
    stateful = {name for name, step in steps(proto.components).items()
                if step.spec.urn == common_urns.primitives.PAR_DO.urn
                and beam_runner_api_pb2.ParDoPayload.FromString(step.spec.payload).state_specs}
    assert {name.rpartition("/")[2] for name in stateful} == {"ParDo(GenerateLane)"}


def test_everything_of_ours_is_named_in_the_package(pipeline: beam.Pipeline) -> None:
    """DoFns, combiners and coders: workers look their classes up by module names, which are the same there."""
    found = {module for data in pickles(pipeline) for module in modules_in(data)}
    assert {f"{PACKAGE}.transforms.{name}" for name in ("generate", "finish", "lanes")} <= found
    assert [module for module in found if not module.startswith(f"{PACKAGE}.")] == []


def unpacked(data: bytes) -> bytes:
    """What a payload holds, its pickles in plain bytes."""
    packed = base64.b64decode(data.rpartition(b"$")[2], validate=False)
    return bz2.decompress(packed) if packed.startswith(b"BZh") else zlib.decompress(packed)


def test_the_graph_holds_no_path_of_the_launcher(pipeline: beam.Pipeline, tmp_path: Path) -> None:
    """Neither this checkout nor folders of the user, the copied model or the template's file.

    Functions of Beam's own name the file that they come from; that is left out.
    """
    plain = pipeline.to_runner_api().SerializeToString() + b"".join(unpacked(data) for data in pickles(pipeline))
    plain = plain.replace(str(Path(beam.__file__).parent).encode(), b"")
    places = (tmp_path, ROOT, Path.home())
    assert [str(place) for place in places if str(place).encode() in plain] == []
    assert b"memory://graph/fake" in plain
    assert re.search(rb"objects://[^/]+/out", plain)


@pytest.mark.parametrize(("flags", "experiments", "said"), [
    (["--runner=DataflowRunner"], [ONE_PROCESS], None),
    (["--runner=FlinkRunner"], None, "FlinkRunner takes its workers as they are"),
])
def test_what_runners_are_told(flags: list[str], experiments: list[str] | None, said: str | None) -> None:
    """Dataflow: one process on each machine, so that an accelerator has one engine.  Others are told nothing."""
    options = parse_options([*flags, f"--accelerator={GPU}"])
    note = ask_runner(options, pin_runner(options), WorkerNeeds(accelerator=GPU))
    assert options.get_all_options(drop_default=True).get("experiments") == experiments
    assert note is said is None or said in str(note)
    plain = parse_options(["--runner=FlinkRunner"])
    assert ask_runner(plain, pin_runner(plain), WorkerNeeds()) is None


@pytest.mark.parametrize("accelerator", ["nvidia-l4", "type:nvidia-l4", "type:nvidia-l4;count:0", "count:1", ""])
def test_an_accelerator_that_no_runner_understands_is_refused(
        accelerator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is opened, with the form."""
    assert main(run_flags("nowhere", tmp_path / "out", tmp_path, f"--accelerator={accelerator}")) == USER_ERROR
    assert re.search(rf"--accelerator={accelerator} is none; write type:NAME;count:N", capsys.readouterr().err)
