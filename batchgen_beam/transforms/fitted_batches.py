"""Batches of a run whose weights are streamed: those that a plan finds best, where the user left them open.

Owns what a worker assumes of rows that it has not seen, and the line that says what was chosen.  Does not know how a
plan is found.  What it chooses reaches no bit of an answer.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import WeightForm
from batchgen_beam.engine.measured_costs import MachineTimes, MeasuredCosts
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.engine.planner import BatchPlan
from batchgen_beam.engine.product_times import times_of_products
from batchgen_beam.engine.run_plan import fit_batches
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.machine_times import head_dtype, remembered_times, run_needs
from batchgen_beam.transforms.product_times import product_times
from batchgen_beam.transforms.resources import available_memory

__all__ = ["fitted_batches"]

LOG = logging.getLogger(__name__)


def fitted_batches(config: ModelConfig, kernels: KernelSet, settings: EngineSettings, cache: Path) -> EngineSettings:
    """The settings with what `settings.left_open` names chosen; as they are where no weight is streamed.

    Times of the model's layers are used where `batchgen-beam plan` has left them in `cache`, else times of products.
    `OptionError` where `weight_memory` is too little for any plan.
    """
    if not settings.weight_memory or not settings.left_open:
        return settings
    needs = run_needs(config, kernels)
    residency = needs.residency(settings.weight_memory)
    if not residency.streamed:
        return settings
    load = ModelLoad.of(model_sizes(config), WeightForm(dtype=settings.dtype, head=head_dtype(kernels)),
                        settings.kv_dtype)
    times, known = _times(load, kernels, cache)
    plan = fit_batches(load, needs, MeasuredCosts(load, times), settings, free=available_memory())
    chosen: dict[str, Any] = {name: value for name, value in _values(plan).items() if name in settings.left_open}
    LOG.info("%s; by times of %s, a step of %d rows takes %.3g s, %.3g s of them for %s bytes from a disk of %.2f "
             "GB/s; the flags of these names override it", ", ".join(f"{n} {v}" for n, v in chosen.items()), known,
             plan.rows, plan.step, residency.streamed_bytes / times.disk, f"{residency.streamed_bytes:,}",
             times.disk / 1e9)
    return replace(settings, **chosen)


def _times(load: ModelLoad, kernels: KernelSet, cache: Path) -> tuple[MachineTimes, str]:
    """And what was timed."""
    found = remembered_times(load, kernels, cache)
    if found is not None:
        return found, "its layers"
    products = product_times(kernels, cache)
    return times_of_products(load, products.seconds, products.disk), "products"


def _values(plan: BatchPlan) -> dict[str, int]:
    """The plan as settings; attention in one piece is 0."""
    b_attn = plan.choice.b_attn
    return {"max_rows": plan.rows, "step_tokens": max(plan.rows, plan.choice.b_moe),
            "attention_batch": b_attn if b_attn < plan.rows else 0}
