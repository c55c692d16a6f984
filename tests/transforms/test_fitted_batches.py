"""Batches of a worker that streams weights: chosen where the user left them open, told, and measured once."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_registry import load_config
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import WeightForm
from batchgen_beam.engine import layer_times
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.errors import OptionError
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.settings import BATCHES, EngineSettings
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms import machine_times, product_times
from batchgen_beam.transforms.fitted_batches import fitted_batches
from batchgen_beam.transforms.machine_times import head_dtype, run_needs
from batchgen_beam.weights import disk_rate
from tests.models.tiny import TINIES, random_model

KERNELS = TorchKernels(torch.float32)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed does not matter here."""
    monkeypatch.setattr(disk_rate, "SAMPLE_BYTES", disk_rate.PIECE_BYTES)
    monkeypatch.setattr(product_times, "SIZE", 64)
    monkeypatch.setattr(layer_times, "ROWS", (1, 2))
    monkeypatch.setattr(layer_times, "PROMPTS", (1, 2))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A tiny Mixtral."""
    folder = tmp_path_factory.mktemp("fitted") / "model"
    random_model(TINIES["mixtral"], 0).save_pretrained(folder)
    return load_config(str(folder))


@pytest.fixture
def settings(config: ModelConfig) -> EngineSettings:
    """The least memory for weights, every batch left open."""
    return EngineSettings(dtype="float32", weight_memory=run_needs(config, KERNELS).least(), left_open=BATCHES)


def test_open_batches_are_chosen_and_told(config: ModelConfig, settings: EngineSettings, tmp_path: Path,
                                          caplog: pytest.LogCaptureFixture) -> None:
    """One line has the choice, its reason and how to override it; nothing else of the settings changes."""
    with caplog.at_level(logging.INFO):
        found = fitted_batches(config, KERNELS, settings, tmp_path)
    assert (found.max_rows, found.step_tokens) != (256, 512)
    [line] = [record.getMessage() for record in caplog.records if "max_rows" in record.getMessage()]
    assert ", ".join(f"{name} {getattr(found, name)}" for name in BATCHES) in line
    assert "bytes from a disk of" in line
    assert "the flags of these names override it" in line
    assert replace(found, **{name: getattr(settings, name) for name in BATCHES}) == settings


def test_given_batches_are_kept(config: ModelConfig, settings: EngineSettings, tmp_path: Path) -> None:
    """One by one, and all of them without any timing."""
    given = replace(settings, max_rows=3, step_tokens=40, attention_batch=2)
    for name in BATCHES:
        left = tuple(other for other in BATCHES if other != name)
        found = fitted_batches(config, KERNELS, replace(given, left_open=left), tmp_path)
        assert getattr(found, name) == getattr(given, name)
        assert found != replace(given, left_open=left)
    assert fitted_batches(config, KERNELS, replace(given, left_open=()), tmp_path / "none") == replace(
        given, left_open=())
    assert not (tmp_path / "none").exists()


def test_a_run_that_streams_nothing_keeps_its_batches(config: ModelConfig, settings: EngineSettings,
                                                      tmp_path: Path) -> None:
    """Without a limit, under one that holds all, and for a model without weights: no timing, no change."""
    whole = run_needs(config, KERNELS).total_bytes
    fake = load_config(str(write_fake_folder(tmp_path / "fake")))
    for model, limit in ((config, 0), (config, whole), (fake, whole)):
        given = replace(settings, weight_memory=limit)
        assert fitted_batches(model, KERNELS, given, tmp_path / "none") == given
    assert not (tmp_path / "none").exists()


def test_too_little_memory_is_refused_before_anything_is_timed(config: ModelConfig, settings: EngineSettings,
                                                               tmp_path: Path) -> None:
    """With the loader's own words."""
    with pytest.raises(OptionError, match=rf"is too little: .* at least {settings.weight_memory:,} bytes"):
        fitted_batches(config, KERNELS, replace(settings, weight_memory=settings.weight_memory - 1), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_products_are_timed_once_and_layers_where_a_plan_timed_them(config: ModelConfig, settings: EngineSettings,
                                                                    tmp_path: Path,
                                                                    caplog: pytest.LogCaptureFixture) -> None:
    """The remembered figures decide: a disk that is said to be slow makes the step long; a plan's go before."""
    fitted_batches(config, KERNELS, settings, tmp_path)
    [place] = tmp_path.glob("product-times-*.json")
    place.write_text(json.dumps({**json.loads(place.read_text()), "disk": 1e3}))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        slow = fitted_batches(config, KERNELS, settings, tmp_path)
        assert fitted_batches(config, KERNELS, settings, tmp_path) == slow
    assert sum("times of products" in record.getMessage() for record in caplog.records) == 2
    assert json.loads(place.read_text())["disk"] == 1e3
    place.write_text("{}")
    assert product_times.product_times(KERNELS, tmp_path).disk > 1e3
    load = ModelLoad.of(model_sizes(config), WeightForm(dtype="float32", head=head_dtype(KERNELS)), "auto")
    machine_times.machine_times(config, load, KERNELS, tmp_path)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fitted_batches(config, KERNELS, settings, tmp_path)
    assert any("times of its layers" in record.getMessage() for record in caplog.records)
