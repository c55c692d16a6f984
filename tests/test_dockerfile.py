"""The worker image: it fits the locks and the submitter, a linter finds nothing, and its steps run outside a container.

Not tested: the base images themselves, which need a container registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen_beam.text.fake_folder import write_fake_folder
from tests.package_sources import ROOT
from tests.test_packaging import pins, tracked

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of each line; continued lines are joined, comments dropped."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, arguments.strip()) for name, arguments in pairs]


def arguments_of(name: str) -> list[str]:
    """What follows each instruction of that name."""
    return [arguments for found, arguments in instructions() if found == name]


def defaults() -> dict[str, str]:
    """Build arguments that have a default."""
    pairs = (argument.partition("=") for argument in arguments_of("ARG"))
    return {name: value for name, equals, value in pairs if equals}


def test_the_image_has_the_submitters_beam() -> None:
    """One SDK version on both sides: the one of every lock that the image may be made from."""
    for lock in ("run", "gcp", "aws"):
        assert ("apache-beam", defaults()["BEAM"]) in pins(lock)


def test_make_image_passes_the_submitters_python(tmp_path: Path) -> None:
    """Beam's pickles are tied to the minor version; the package's range holds the Dockerfile's default."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    done = subprocess.run(["make", "--dry-run", f"VENV={tmp_path}", "image"], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    assert f"--build-arg PYTHON={MINOR} " in done.stdout
    assert int(defaults()["PYTHON"].partition(".")[2]) >= 11


def test_both_stages_have_that_python() -> None:
    """Beam's entry point comes from the SDK image of the same Python, and the environment is made with it."""
    assert arguments_of("FROM") == ["apache/beam_python${PYTHON}_sdk:${BEAM} AS beam", "${BASE}"]
    assert "python:${PYTHON}-slim" in defaults()["BASE"]
    assert "python${PYTHON} -m venv /opt/batchgen" in arguments_of("RUN")


def test_beam_starts_workers_in_that_environment() -> None:
    """The entry point is Beam's own, and makes no environment of its own."""
    assert "--from=beam /opt/apache/beam /opt/apache/beam" in arguments_of("COPY")
    assert json.loads(arguments_of("ENTRYPOINT")[-1]) == ["/opt/apache/beam/boot"]
    assert "RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1" in arguments_of("ENV")


def test_the_work_directory_is_away_from_any_source() -> None:
    """A worker that starts beside folders named models and pipelines would import those."""
    work = Path(arguments_of("WORKDIR")[-1])
    targets = [Path(copy.split()[-1]) for copy in arguments_of("COPY")]
    assert not any(work.is_relative_to(target) or target.is_relative_to(work) for target in targets)


def test_what_is_copied_is_committed_and_not_ignored() -> None:
    """The build context of a fresh clone has it."""
    files = {path.as_posix() for path in tracked()}
    ignored = (ROOT / ".dockerignore").read_text().split()
    for copy in arguments_of("COPY"):
        for source in copy.replace("${LOCK}", defaults()["LOCK"]).split()[:-1]:
            if not source.startswith(("--from", "/")):
                assert any(name == source or name.startswith(f"{source}/") for name in files), source
                assert source not in ignored


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint: its wheel is installed on x86-64 only")
def test_the_linter_finds_nothing() -> None:
    """As `make lint` runs it; each exception stands beside its line."""
    done = subprocess.run([str(HADOLINT), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


class OutsideAContainer:
    """The image's steps in a folder in place of the root."""

    def __init__(self, root: Path, lock: str) -> None:
        self.root = root
        self.variables = {"PYTHON": MINOR, "LOCK": lock}
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def local(self, text: str) -> str:
        """With paths of the image below the folder, and build arguments filled in."""
        for name, value in self.variables.items():
            text = text.replace(f"${{{name}}}", value)
        return re.sub(r"(?<![\w.])/(opt|tmp|var)\b", rf"{self.root}/\1", text)

    def copy(self, arguments: str) -> None:
        """COPY: files into a folder, or a folder's content."""
        *sources, target = (self.local(word) for word in arguments.split())
        for source in map(ROOT.joinpath, sources):
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                Path(target).mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def env(self, arguments: str) -> None:
        """ENV."""
        for name, value in re.findall(r"(\w+)=(\S+)", self.local(arguments)):
            self.environment[name] = value.replace("${PATH}", self.environment["PATH"])

    def run(self, arguments: str) -> None:
        """RUN; what was downloaded before is taken from uv's cache."""
        step = self.local(arguments).replace("--no-cache-dir", "").replace("--no-cache", "")
        done = subprocess.run(["sh", "-euc", step], env=self.environment, cwd=self.root, capture_output=True,
                              text=True, check=False)
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: the image's step would install one here")
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("lock", ["run", "gcp", "aws"])
def test_the_steps_of_the_image_make_an_environment_that_works(lock: str, tmp_path: Path) -> None:
    """All RUN, COPY and ENV lines in a clean environment: there the command answers from the work directory.

    Left out: what comes from Beam's image.
    """
    image = OutsideAContainer(tmp_path, lock)
    steps = {"RUN": image.run, "COPY": image.copy, "ENV": image.env}
    for name, arguments in instructions():
        if name in steps and not arguments.startswith("--from=beam"):
            steps[name](arguments)
    work = Path(image.local(arguments_of("WORKDIR")[-1]))
    work.mkdir(parents=True)
    assert not (tmp_path / "tmp" / "source").exists()
    write_fake_folder(work / "model")
    image.root = work
    image.run("batchgen-beam inspect model")
    image.run("uv pip check")
    image.run(f"python -c 'import apache_beam as b; assert b.__version__ == \"{defaults()['BEAM']}\"'")
    image.run("python -c 'from batchgen_beam.kernels.native_library import library; assert library() is not None'")
    image.run("python -c 'import apache_beam.runners.worker.sdk_worker_main, batchgen_beam.transforms.generate'")
