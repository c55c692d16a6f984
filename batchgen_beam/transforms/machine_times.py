"""What a model's layers take on this machine, measured once and then remembered beside the model cache.

A few layers with random weights stand for the whole model, so a configuration is all that is needed.  Owns the choice
of those layers, and what the file that remembers is for.  Does not know how passes are timed or what a plan is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.engine.layer_times import measure_passes
from batchgen_beam.engine.measured_costs import MachineTimes, kinds_of
from batchgen_beam.engine.model_load import LayerLoad, ModelLoad
from batchgen_beam.kernels.choice import machine_digest, settle_threads
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.remembered import recall, remembered
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.weights.disk_rate import disk_rate
from batchgen_beam.weights.name_tables import expected_parameters
from batchgen_beam.weights.random_model import random_model
from batchgen_beam.weights.weight_needs import WeightNeeds, weight_needs

__all__ = ["COLD_BYTES", "head_dtype", "layers_to_time", "machine_times", "remembered_times", "run_needs",
           "times_digest"]

VERSION = 1
"""Raised when figures of an older release say something else."""

COLD_BYTES = 256 << 20
"""Weights of the timed layers together, where the model has so many: more than processors keep."""

ROOM = 4 << 30
"""Packed weights of the timed layers at most; one of a shape is used again beyond that."""

VOCABULARY = 1 << 15
"""Rows of the timed head at most; it takes as long for each."""


def head_dtype(kernels: KernelSet) -> str:
    """What the kernel set keeps the head's products in, in memory of their own even where the embedding is tied."""
    torch_set = kernels.name == TorchKernels.name
    return "float32" if torch_set else str(kernels.dtype).removeprefix("torch.")


def run_needs(config: ModelConfig, kernels: KernelSet) -> WeightNeeds:
    """What a run's weights need in memory, from the configuration alone."""
    parameters = {parameter.name: parameter for parameter in expected_parameters(config)}
    return weight_needs(config, parameters, kernels, packing_of(kernels))


def machine_times(config: ModelConfig, load: ModelLoad, kernels: KernelSet, cache: Path) -> MachineTimes:
    """The times of each kind of layer of `load`, which is the configuration's.

    Read from `cache` where they were measured before, for the same machine, model, kernels and threads.
    """
    return remembered(_place(load, kernels, cache), lambda: _measure(config, load, kernels, cache),
                      to_json=MachineTimes.to_json, from_json=MachineTimes.from_json)


def remembered_times(load: ModelLoad, kernels: KernelSet, cache: Path) -> MachineTimes | None:
    """What `machine_times` has left in `cache`; None where that is nothing."""
    return recall(_place(load, kernels, cache), MachineTimes.from_json)


def _place(load: ModelLoad, kernels: KernelSet, cache: Path) -> Path:
    return cache / f"layer-times-{times_digest(load, kernels)}.json"


def times_digest(load: ModelLoad, kernels: KernelSet) -> str:
    """All that the times depend on, as a short digest."""
    facts = {"version": VERSION, "machine": machine_digest(), "kernels": dict(kernels.facts()), "model": asdict(load),
             "threads": kernels.threads}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _measure(config: ModelConfig, load: ModelLoad, kernels: KernelSet, cache: Path) -> MachineTimes:
    layers = load.layers[:layers_to_time(load.layers)]
    rows = min(config.vocab_size, VOCABULARY)
    model = random_model(replace(config, num_hidden_layers=len(layers), vocab_size=rows), kernels, seed=0, room=ROOM)
    settle_threads(kernels)
    kinds = [[index for index, layer in enumerate(layers) if layer == kind] for kind in kinds_of(load.layers)]
    found = measure_passes(model, kernels, kinds)
    more = config.vocab_size / rows
    head = replace(found.head, seconds=tuple(more * seconds for seconds in found.head.seconds))
    return MachineTimes(kinds=found.kinds, head=head, combine=found.combine, disk=disk_rate(cache))


def layers_to_time(layers: Sequence[LayerLoad]) -> int:
    """The first layers that hold all kinds, and `COLD_BYTES` where all of them do."""
    missing, size = set(layers), 0
    for count, layer in enumerate(layers, 1):
        missing.discard(layer)
        size += layer.attention_bytes + layer.feed_forward_bytes
        if not missing and size >= COLD_BYTES:
            return count
    return len(layers)
