"""llama.cpp's server on the loopback interface, continuous batching.

Settings: slots (rows at once; each has its own share of the context), batch and ubatch (logical and physical tokens),
flash_attention (on, off, auto), kv_type (f16, bf16), weights (f16, bf16: which GGUF file), prefix_caching (a slot keeps
its last prompt).  float16 weights are the default: its kernels for them were the faster ones where both were tried.
`ignore_eos` bans the end-of-sequence id where the other engines pass over it, so rows may differ after that place.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEP = 256
"""The context of a slot is a multiple of so many tokens."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(job: dict[str, Any], port: int) -> list[str]:
    """The server's command line without its program."""
    settings, threads = job["settings"], str(job["threads"])
    slots = min(settings["slots"], job["active_rows"])
    longest = max(len(row["prompt_ids"]) + row["max_tokens"] for row in [*job["rows"], *job["warmup"]])
    context = -(-(longest + 1) // STEP) * STEP * slots
    return ["-m", job["model"], "--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads,
            "-np", str(slots), "-c", str(context), "-b", str(settings["batch"]), "-ub", str(settings["ubatch"]),
            "-cb", "-fa", settings["flash_attention"], "-ctk", settings["kv_type"], "-ctv", settings["kv_type"],
            "--cache-ram", "0"]


class LlamaServer:
    """The server as a child process, and one client thread for each slot with a few in waiting."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.port = free_port()
        self.arguments = arguments(job, self.port)
        self.slots = min(job["settings"]["slots"], job["active_rows"])
        self.keep = job["settings"]["prefix_caching"]
        self.version = Path(job["program"]).with_name("version.txt").read_text().strip()
        self.process = subprocess.Popen([job["program"], *self.arguments], stdout=subprocess.DEVNULL)
        while not self._healthy():
            if self.process.poll() is not None:
                raise SystemExit(f"llama-server ended with {self.process.returncode}: {self.arguments}")
            time.sleep(0.05)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _answer(self, row: dict[str, Any]) -> list[int]:
        body = {"prompt": row["prompt_ids"], "n_predict": row["max_tokens"], "temperature": 0.0, "samplers": ["top_k"],
                "top_k": 1, "ignore_eos": True, "return_tokens": True, "cache_prompt": self.keep, "stream": False}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "tokens" not in answer:
            raise RuntimeError(f"llama-server answered {str(answer)[:300]}")
        return list(answer["tokens"])

    def generate(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Ids of each row."""
        with ThreadPoolExecutor(self.slots + 4) as clients:
            return list(clients.map(self._answer, rows))

    def facts(self) -> dict[str, Any]:
        """The version, and the command line with the model's file name only."""
        shown = [Path(word).name if word.startswith("/") else word for word in self.arguments]
        shown[shown.index("--port") + 1] = "PORT"
        return {"llama_cpp": self.version, "arguments": " ".join(shown)}

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def load(job: dict[str, Any]) -> LlamaServer:
    """The server of this job."""
    return LlamaServer(job)
