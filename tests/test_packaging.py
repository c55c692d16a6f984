"""What leaves the repository: the wheel's contents, the lock files, and nothing of the machine it was made on."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.package_sources import PACKAGE, ROOT, source_files

LOCKS = ("run", "test", "bench", "gcp", "aws", "airflow", "tools", "demo-model")
EXTRAS = ("test", "bench", "gcp", "aws")
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", re.M)
BINARY = {".parquet", ".png"}


def tracked() -> list[Path]:
    """Files and links of the repository as git knows them, relative."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


def blocks(lock: str) -> list[str]:
    """The lock's requirements, each with its continuation lines."""
    lines = [line for line in lock.splitlines() if line and not line.lstrip().startswith("#")]
    return re.split(r"\n(?=\S)", "\n".join(lines))


def pins(name: str) -> set[tuple[str, str]]:
    """(name, version) of every line of a lock; a name may have one version for each Python."""
    return set(PIN.findall((ROOT / "locks" / f"{name}.txt").read_text()))


def tracked_copy(folder: Path) -> Path:
    """The tracked files, as a fresh clone has them."""
    for path in tracked():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the tracked files and the wheel that is built from that sdist."""
    source, out = tracked_copy(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source],
                   check=True, capture_output=True, text=True)
    return out


def wheel_of(folder: Path) -> Path:
    """The one wheel of a folder."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_one_top_level_name_and_every_module(built: Path) -> None:
    """Only `batchgen_beam` reaches site-packages, with all modules of models/ and pipelines/ and the typing marker."""
    names = zipfile.ZipFile(wheel_of(built)).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {PACKAGE}
    committed = {path.as_posix() for path in tracked()}
    wanted = {module for module, path in source_files().items() if path.relative_to(ROOT).as_posix() in committed}
    packed = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names
              if name.endswith(".py")}
    assert packed == wanted
    assert f"{PACKAGE}/py.typed" in names
    profiles = {path for path in committed if path.startswith(f"{PACKAGE}/engine/profiles/")}
    assert profiles
    assert profiles <= set(names)


def test_the_source_distribution_holds_files_not_links(built: Path) -> None:
    """Unpacked anywhere, the sdist has real files under batchgen_beam/models and batchgen_beam/pipelines."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    assert any(member.name.endswith(f"/{PACKAGE}/models/interface.py") for member in members)


def test_the_native_library_is_in_the_wheel_and_its_source_in_the_sdist(built: Path) -> None:
    """One wheel for all versions of Python, which needs no compiler; the sdist can build it again."""
    wheel = wheel_of(built)
    if platform.machine() == "x86_64" and sys.platform == "linux":
        assert re.search(r"-py3-none-linux_x86_64\.whl$", wheel.name)
        assert f"{PACKAGE}/kernels/_native.abi3.so" in zipfile.ZipFile(wheel).namelist()
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {path.as_posix() for path in tracked() if path.suffix in {".cpp", ".h"}} <= packed


def test_without_a_compiler_the_package_installs_all_the_same(tmp_path: Path) -> None:
    """A wheel without the library, and one line that says what that means."""
    source = tracked_copy(tmp_path / "source")
    nowhere = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    done = subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source],
                          env={**os.environ, **nowhere}, capture_output=True, text=True,
                          check=True)
    told = [line for line in (done.stdout + done.stderr).splitlines() if "native kernels not built" in line]
    assert len(told) == (platform.machine() == "x86_64")
    assert all("torch alone" in line for line in told)
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel_of(tmp_path)).namelist())


def test_the_script_is_declared() -> None:
    """The command `batchgen-beam` leads into the pipelines package."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"batchgen-beam": "batchgen_beam.pipelines.main:main"}


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_pinned_with_hashes_and_without_addresses(name: str) -> None:
    """A lock names versions and hashes; where they are downloaded from is the installer's business."""
    text = (ROOT / "locks" / f"{name}.txt").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*--(index|extra-index|find-links)", text, re.M)
    loose = [block for block in blocks(text) if not PIN.match(block) or "--hash=sha256:" not in block]
    assert loose == []


@pytest.mark.parametrize("name", EXTRAS)
def test_tests_and_benchmarks_run_with_the_versions_that_users_get(name: str) -> None:
    """The lock of each extra holds every version of the run lock."""
    assert pins("run") <= pins(name)


def test_every_declared_dependency_is_locked() -> None:
    """pyproject.toml and the locks name the same direct dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert tuple(extras) == EXTRAS
    declared = {"run": project["dependencies"], **extras}
    for lock, requirements in declared.items():
        locked = {name.lower().replace("_", "-") for name, _ in pins(lock)}
        wanted = {re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-") for line in requirements}
        assert wanted <= locked, lock


def test_tracked_files_name_no_machine() -> None:
    """No path of somebody's machine and no package index is written down anywhere."""
    private = re.compile(r"(?<![\w.])/(?:work|root|home|Users)/|pypi\.(?:org|python)|pythonhosted")
    found = [f"{path}: {match.group()}" for path in tracked()
             if path != Path("tests/test_packaging.py") and path.suffix not in BINARY
             and (ROOT / path).is_file()
             for match in private.finditer((ROOT / path).read_text(encoding="utf-8"))]
    assert found == []


def test_models_environments_and_outputs_stay_out() -> None:
    """Nothing large, made or downloaded is committed."""
    paths = tracked()
    unwanted = re.compile(r"(^|/)(\.venv|\.cache|out|dist|build)/|\.(gguf|safetensors|whl)$|(^|/)uv\.lock$")
    assert [path for path in paths if unwanted.search(path.as_posix())] == []
    assert [path for path in paths if (ROOT / path).lstat().st_size > 512 * 1024] == []


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(900)
def test_an_installed_wheel_runs_the_demo_from_another_folder(
    built: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """In an empty environment, with the wheel and the run lock only, the demo's pipeline answers 54 of 60 rows."""
    environment, folder = tmp_path / "env", tmp_path / "elsewhere"
    folder.mkdir()
    uv, python = Path(sys.executable).parent / "uv", environment / "bin" / "python"
    subprocess.run([uv, "venv", "--python", sys.executable, environment], check=True)
    subprocess.run([uv, "pip", "install", "--python", python, "--require-hashes", "-r", ROOT / "locks" / "run.txt"],
                   check=True)
    subprocess.run([uv, "pip", "install", "--python", python, "--no-deps", wheel_of(built)], check=True)
    done = subprocess.run(
        [environment / "bin" / "batchgen-beam", "run", "--model", smollm2_gguf, "--output", "out",
         "--input", ROOT / "examples" / "*.parquet", "--model-cache", "models"],
        cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr[-4000:]
    rows = {kind: sum(pq.read_metadata(path).num_rows for path in (folder / "out" / kind).rglob("rg-*.parquet"))
            for kind in ("results", "failures")}
    assert rows == {"results": 54, "failures": 6}
