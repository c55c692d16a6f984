"""Tiny models for the processes of a tail, and workers' engines on them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from batchgen_beam.engine.tail_rule import Tail, TailChoice, TailCost, TailRule, plan_tail
from batchgen_beam.settings import EngineSettings
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.engine_loader import LoadedEngine, load_engine
from batchgen_beam.transforms.model_folder import ModelFolder
from tests.models import tiny_llama
from tests.models.tiny import TINIES, random_model

LARGER = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 160}
"""So that every product can be dealt."""

SETTINGS = EngineSettings(dtype="float32", threads=1, max_rows=4, step_tokens=64, prefill_chunk=32, kv_memory=1 << 22)


def write_model(family: str, folder: Path) -> Path:
    """A tiny Llama or Mixtral with the fake model's tokenizer."""
    if family == "llama":
        torch.manual_seed(0)
        LlamaForCausalLM(tiny_llama.Tiny(keys=LARGER).config()).save_pretrained(folder)
    else:
        tiny = TINIES[family]
        random_model(replace(tiny, keys={**tiny.keys, **LARGER}), 0).save_pretrained(folder)
    fake = write_fake_folder(folder.parent / f"fake-{family}")
    for file in fake.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


def free_group(tail: Tail, cost: TailCost) -> TailChoice:
    """The rule, had it been measured that a group costs nothing."""
    return plan_tail(tail, replace(cost, split=0.0, prefill=0.0))


def load(folder: Path, settings: EngineSettings, *, rule: TailRule = free_group) -> LoadedEngine:
    """A worker's engine on this model."""
    model = ModelFolder.open(folder, template=None, clock=datetime(2026, 1, 1, tzinfo=UTC), max_context=None)
    return load_engine(model, settings, "content", folder.parent / "cache", rule=rule)
