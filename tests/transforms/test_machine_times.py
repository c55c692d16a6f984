"""Laws of this machine's times: measured once for a machine, model and number of threads; every kind has a layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import WeightForm
from batchgen_beam.engine.measured_costs import MachineTimes, MeasuredCosts
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.transforms.machine_times import COLD_BYTES, layers_to_time, machine_times, times_digest
from batchgen_beam.transforms.timed_engine import timed_kernels
from batchgen_beam.weights import disk_rate
from tests.engine.test_planner import MB, MOE
from tests.kernels.sets import HIGHEST, NEEDS_NATIVE, native
from tests.weights.test_random_model import config_of


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A tiny mixture of experts."""
    return config_of("mixtral", tmp_path_factory.mktemp("mixtral"))


def load_of(config: ModelConfig) -> ModelLoad:
    """What its layers read and compute in float32."""
    return ModelLoad.of(model_sizes(config), WeightForm(dtype="float32"), "auto")


def torch_set(config: ModelConfig, cache: Path, threads: int = 1) -> KernelSet:
    """The kernels of a run with these threads."""
    return timed_kernels(config, dtype="float32", kernels="torch", threads=threads, cache=cache)


def files(cache: Path) -> list[Path]:
    """What is remembered."""
    return sorted(cache.glob("layer-times-*.json"))


def test_times_are_measured_once(mixtral: ModelConfig, tmp_path: Path) -> None:
    """The second call says what the first one wrote: a measurement would never give the same digits."""
    kernels = torch_set(mixtral, tmp_path)
    first = machine_times(mixtral, load_of(mixtral), kernels, tmp_path)
    assert len(files(tmp_path)) == 1
    assert machine_times(mixtral, load_of(mixtral), kernels, tmp_path) == first
    assert first.disk > 0
    assert MeasuredCosts(load_of(mixtral), first).head(1) > 0
    assert {path.name for path in tmp_path.iterdir()} == {files(tmp_path)[0].name}


def test_other_threads_and_other_models_are_measured_anew(mixtral: ModelConfig, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own file; one that can't be read is measured again."""
    monkeypatch.setattr(disk_rate, "SAMPLE_BYTES", disk_rate.PIECE_BYTES)
    kernels, wider = torch_set(mixtral, tmp_path), replace(mixtral, num_experts_per_tok=3)
    machine_times(mixtral, load_of(mixtral), kernels, tmp_path)
    machine_times(wider, load_of(wider), kernels, tmp_path)
    assert len(files(tmp_path)) == 2
    torch.set_num_threads(2)
    machine_times(mixtral, load_of(mixtral), kernels, tmp_path)
    assert len(files(tmp_path)) == 3
    broken = tmp_path / f"layer-times-{times_digest(load_of(mixtral), kernels)}.json"
    broken.write_text('{"kinds": 3, "head": 1, "combine": 1, "disk": 1}')
    found = machine_times(mixtral, load_of(mixtral), kernels, tmp_path)
    assert found == MachineTimes.from_json(json.loads(broken.read_text()))
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize("broken", [[], {}, {"kinds": 3, "head": 1, "combine": 1, "disk": 1}, {"kinds": [{}]}])
def test_what_is_no_times_is_told_apart(broken: Any) -> None:
    """By an error that `remembered` knows."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        MachineTimes.from_json(broken)


@NEEDS_NATIVE
def test_threads_count_where_they_reach_no_bit(mixtral: ModelConfig) -> None:
    """The native set's facts do not have them, its times do."""
    found = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.add(times_digest(load_of(mixtral), native(torch.float32, HIGHEST[torch.float32], threads)))
    assert len(found) == 2


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_each_kind_of_layer_is_timed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and sparse layers, and those with and without a window, have times of their own."""
    monkeypatch.setattr(disk_rate, "SAMPLE_BYTES", disk_rate.PIECE_BYTES)
    config = config_of(name, tmp_path)
    load = load_of(config)
    times = machine_times(config, load, torch_set(config, tmp_path), tmp_path)
    assert len(times.kinds) == len(set(load.layers)) == 2


def test_the_first_layers_hold_all_kinds_and_more_than_processors_keep() -> None:
    """No fewer layers than it takes, and no more; all of them where they are small."""
    large = replace(MOE, experts=0, fixed_bytes=COLD_BYTES // 2 - 2 * MB)
    assert layers_to_time([large] * 9) == 2
    assert layers_to_time([large] * 4 + [MOE] * 9) == 5
    assert layers_to_time([MOE] * 3) == 3
    assert layers_to_time([replace(large, fixed_bytes=COLD_BYTES)] + [MOE] * 3) == 2
