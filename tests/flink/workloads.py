"""The two jobs that run on the cluster: their rows, models and flags, and what has to hold of what they publish.

Each job also runs on the local runner: that run's rows, bit by bit, are what every other run has to come to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from batchgen_beam.text.fake_folder import END_ID, START_ID, write_fake_folder
from batchgen_beam.transforms.progress_files import ProgressSample, read_samples
from tests.support.jobs import published, report, timeless, write_rows

__all__ = ["FAKE", "TINY", "Job", "Workload", "check_engines", "check_spread", "check_work", "fed_fill"]

FILES = 4
LANES = 8
LEAST_FILL = 0.85
LEAST_SHARE = 0.7
MOST_REPEATED = 0.1
LEAST_STEPS = 100
"""Processes whose engine ran fewer steps while there were rows say nothing about its fill."""

HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD, LAYERS, VOCABULARY = 64, 96, 4, 2, 16, 2, 320


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`capacity`: rows that one engine runs at once."""

    name: str
    rows: int
    capacity: int
    longest: int
    flags: tuple[str, ...]


FAKE = Workload(name="fake model", rows=20_000, capacity=256, longest=64,
                flags=("--dtype=float32", "--step-tokens=512", "--kv-memory=64MiB"))
TINY = Workload(name="tiny Llama", rows=2_000, capacity=16, longest=48,
                flags=("--dtype=float32", "--kernels=torch", "--step-tokens=128", "--kv-memory=64MiB"))


def write_tiny_llama(folder: Path) -> Path:
    """A random Llama of 150,000 weights with the fake model's tokenizer; it seldom ends an answer by itself."""
    write_fake_folder(folder)
    draw = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
        shapes |= {
            f"{at}.self_attn.q_proj": (HEADS * HEAD, HIDDEN), f"{at}.self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            f"{at}.self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), f"{at}.self_attn.o_proj": (HIDDEN, HEADS * HEAD),
            f"{at}.mlp.gate_proj": (WIDTH, HIDDEN), f"{at}.mlp.up_proj": (WIDTH, HIDDEN),
            f"{at}.mlp.down_proj": (HIDDEN, WIDTH)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) * shape[1] ** -0.5 * 2
               for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=draw) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "bos_token_id": START_ID, "eos_token_id": END_ID}))
    return folder


def input_rows(workload: Workload) -> list[dict[str, Any]]:
    """Short prompts, greedy and sampled, with answers of 4 to `longest` tokens."""
    rows = []
    for index in range(workload.rows):
        draw = random.Random(index)
        rows.append({"uuid": f"row-{index:05d}", "prompt": f"question {index}: " + "why? " * draw.randrange(6),
                     "temperature": [0.0, 0.8][index % 2], "seed": index % 7,
                     "max_tokens": draw.randrange(4, workload.longest + 1)})
    return rows


def fed_fill(sample: ProgressSample) -> float:
    """The mean share of the slots in use, over the steps while a lane had rows that were not admitted."""
    engine = sample.engine
    return engine.fed_row_steps / max(engine.fed_steps * engine.capacity, 1)


def check_engines(samples: Sequence[ProgressSample], *, at_least: int) -> None:
    """One load in each process; in those that had work two lanes at once, and slots filled while rows were there."""
    assert len(samples) >= at_least
    assert {one.engines for one in samples} == {1}
    worked = [one for one in samples if one.engine.fed_steps >= LEAST_STEPS]
    assert len(worked) >= 2
    assert min(one.engine.lanes_peak for one in worked) >= 2
    assert min(fed_fill(one) for one in worked) >= LEAST_FILL


def check_spread(samples: Sequence[ProgressSample]) -> None:
    """The lanes are shared evenly: every process has at least `LEAST_SHARE` of its part of the rows."""
    answered = [one.answered for one in samples]
    assert min(answered) >= LEAST_SHARE * sum(answered) / len(answered)


class Job:
    """A workload's model and input in a folder, and its outputs beside them."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self.workload = workload
        self.folder = folder
        self.model = folder / "model"
        self._rows = input_rows(workload)
        if workload is FAKE:
            write_fake_folder(self.model, eos_every=60)
        else:
            write_tiny_llama(self.model)
        size = workload.rows // FILES
        for number in range(FILES):
            part = self._rows[number * size : (number + 1) * size]
            write_rows(folder / "in" / f"part-{number}.parquet", part, row_group_size=size // 4)

    def arguments(self, output: str, *more: str) -> list[str]:
        """The arguments of `batchgen-beam`.  All is named as what every worker has at this place."""
        return ["run", f"--input=file://{self.folder}/in/*.parquet", f"--output=file://{self.folder / output}",
                f"--model=file://{self.model}", f"--max-rows={self.workload.capacity}", "--threads=1",
                f"--lanes={LANES}", "--progress-interval=0.5", *self.workload.flags, *more]

    def rows(self, output: str) -> list[dict[str, Any]]:
        """What was published, in order, without times."""
        return timeless(published(self.folder / output))

    def samples(self, output: str) -> list[ProgressSample]:
        """What every process of the latest run that had an engine says of itself."""
        folders = sorted((self.folder / output / "_progress").glob("*"))
        found = read_samples(str(folders[-1])).samples if folders else ()
        return sorted((one for one in found if one.engines), key=lambda one: one.process)

    def check_rows(self, output: str, expected: Sequence[Mapping[str, Any]]) -> None:
        """Every row, once, in the input's order, bit by bit as expected; the counts balance."""
        place = self.folder / output
        counts = report(place)["counts"]
        assert (counts["rows"], counts["results"], counts["failed"]) == (self.workload.rows, self.workload.rows, 0)
        assert (place / "_SUCCESS").exists()
        for path in sorted((place / "results").glob("part-*")):
            ids = [uuid for file in sorted(path.rglob("*.parquet")) for uuid in
                   pq.read_table(file, columns=["uuid"])["uuid"].to_pylist()]
            assert ids == pq.read_table(self.folder / "in" / path.name)["uuid"].to_pylist()
        found = self.rows(output)
        assert [row["uuid"] for row in found] == [row["uuid"] for row in self._rows]
        assert found == list(expected)


def check_work(job: Job, samples: Sequence[ProgressSample]) -> None:
    """Few rows were computed twice: those whose answers were not stored yet when their process died."""
    computed = sum(one.engine.rows_done for one in samples)
    assert computed <= job.workload.rows * (1 + MOST_REPEATED)
