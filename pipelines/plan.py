"""`batchgen-beam plan`: what a model and a workload need, and how long they take, before anything is loaded.

Owns the flags, and the choice between this machine, whose layers are timed, and one that a profile describes.  Does not
know how a plan is found, or how it is told.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_registry import load_config, load_config_file, require_supported
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import ModelSizes, WeightForm
from batchgen_beam.engine.device_profile import load_profile, profile_names
from batchgen_beam.engine.measured_costs import MeasuredCosts
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.engine.planner import plan_batches
from batchgen_beam.engine.roofline import Roofline
from batchgen_beam.engine.run_plan import plan_run
from batchgen_beam.engine.tiers import Budgets, Workload
from batchgen_beam.errors import OptionError
from batchgen_beam.pipelines.options import OPTIONS, StrictParser, add_options, parse_size
from batchgen_beam.pipelines.plan_report import Planned, report
from batchgen_beam.settings import InputColumns
from batchgen_beam.text.template import TemplateText
from batchgen_beam.transforms.input_lengths import input_lengths
from batchgen_beam.transforms.machine_times import head_dtype, machine_times, run_needs
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.model_store import resolve_model
from batchgen_beam.transforms.resources import available_cores, available_memory
from batchgen_beam.transforms.timed_engine import timed_kernels

__all__ = ["plan_model"]

_OF_RUN = ("--dtype", "--kv-dtype", "--kernels", "--threads")
"""Flags that make a run's arithmetic another one than that of the plan, where only one of them has it."""


def plan_model(flags: Sequence[str], stream: TextIO) -> None:
    """Write the plan; a `UserError` says what can't fit, with the numbers, or what is missing."""
    given = _parser().parse_args(list(flags))
    if given.model is None:
        raise OptionError("--model is missing; give a model folder, a GGUF file, a config.json or a public model name")
    config = _config(given)
    work = _workload(given)
    if work.row_tokens > config.max_position_embeddings:
        raise OptionError(f"prompts of {work.prompt_tokens:,} and answers of {work.output_tokens:,} tokens are more "
                          f"than the model's context of {config.max_position_embeddings:,}")
    plan = _here if given.device_profile is None else _elsewhere
    for line in report(plan(given, config, model_sizes(config), work), given.price_per_hour):
        stream.write(line + "\n")


def _parser() -> StrictParser:
    parser = StrictParser(prog="batchgen-beam plan", allow_abbrev=False,
                          description="What a model and a workload need, and how long they take.")
    add_options(parser, "--model", "--model-cache", "--chat-template", "--input", "--limit", "--dtype", "--kv-dtype",
                "--kernels", "--threads", "--id-column", "--prompt-column", "--messages-column", "--token-ids-column")
    parser.add_argument("--rows", type=_count, metavar="N", help="rows to answer; default: those of --input")
    parser.add_argument("--prompt-tokens", type=_count, metavar="MEAN",
                        help="tokens of a prompt in the mean; default: that of the first rows of --input")
    parser.add_argument("--output-tokens", type=_count, metavar="MEAN", help="tokens of an answer in the mean")
    parser.add_argument("--device-profile", metavar="NAME",
                        help=f"a device by its rates: {', '.join(profile_names())}, or a JSON file of that form; "
                             "default: this machine, whose layers are timed")
    parser.add_argument("--devices", type=_count, metavar="N", default=1, help="how many of the profile's devices")
    parser.add_argument("--device-memory", type=parse_size, metavar="SIZE",
                        help="of each device; default: the profile's, or what is free on this machine")
    parser.add_argument("--host-memory", type=parse_size, metavar="SIZE", default=0,
                        help="for weights, keys and values that the profile's devices do not hold")
    parser.add_argument("--weight-memory", type=_limit, metavar="SIZE",
                        help="what of the devices' memory weights and their buffers may take; 0: all of it")
    parser.add_argument("--price-per-hour", type=_price, metavar="X", help="of all devices together")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _limit(text: str) -> int | None:
    """Bytes; 0 is no limit, as it is to `run`."""
    return parse_size(text) or None


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no price")
    return price


def _config(given: argparse.Namespace) -> ModelConfig:
    """Of a folder, a bare config.json, a GGUF file (converted first) or a public name."""
    path = Path(given.model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return load_config_file(path)
    return load_config(str(resolve_model(given.model, Path(given.model_cache))) if path.is_file() else given.model)


def _workload(given: argparse.Namespace) -> Workload:
    """The statistics that are given, or those of an input."""
    rows, prompt = given.rows, given.prompt_tokens
    if given.input:
        columns = InputColumns(id=given.id_column, prompt=given.prompt_column, messages=given.messages_column,
                               token_ids=given.token_ids_column)
        template = None if given.chat_template is None else TemplateText.of_file(Path(given.chat_template))
        folder = ModelFolder.open(resolve_model(given.model, Path(given.model_cache)), template=template,
                                  clock=datetime.now(UTC), max_context=None)
        found = input_lengths(given.input, columns, folder, limit=given.limit)
        rows, prompt = rows or found.rows, prompt or max(1, round(found.prompt_tokens))
    missing = [flag for flag, value in (("--rows", rows), ("--prompt-tokens", prompt),
                                        ("--output-tokens", given.output_tokens)) if value is None]
    if missing:
        raise OptionError(f"{', '.join(missing)}: not given; a plan needs the number of rows and the mean tokens of "
                          "prompts and answers (--input PATTERN gives the first two)")
    return Workload(rows=rows, prompt_tokens=prompt, output_tokens=given.output_tokens)


def _here(given: argparse.Namespace, config: ModelConfig, sizes: ModelSizes, work: Workload) -> Planned:
    """On this machine: one memory, and weights in the run's dtype, whatever they are stored as."""
    if given.host_memory or given.devices != 1:
        raise OptionError("--host-memory and --devices are of a --device-profile; this machine has one memory")
    require_supported(config)
    threads = given.threads or available_cores()
    kernels = timed_kernels(config, dtype=given.dtype, kv_dtype=given.kv_dtype, kernels=given.kernels, threads=threads,
                          cache=Path(given.model_cache))
    form = WeightForm(dtype=given.dtype, head=head_dtype(kernels))
    load = ModelLoad.of(sizes, form, given.kv_dtype)
    budgets = Budgets(device=given.device_memory or available_memory(), weights=given.weight_memory, unified=True)
    costs = MeasuredCosts(load, machine_times(config, load, kernels, Path(given.model_cache)))
    needs = run_needs(config, kernels)
    plan = plan_run(load, needs, costs, budgets, work)
    where = (f"this machine: {kernels.name} kernels, {threads} thread{'s' if threads > 1 else ''}, layers timed with "
             f"random weights, disk {costs.disk / 1e9:.2f} GB/s")
    return Planned(model_type=config.model_type, sizes=sizes, work=work, budgets=budgets, plan=plan,
                   weight_bytes=needs.total_bytes, where=(("machine", where),), kept=f"as {given.dtype}",
                   flags=tuple(_repeated(given)))


def _repeated(given: argparse.Namespace) -> Iterator[str]:
    """Flags of `run` that were given to the plan, where they are not the default."""
    for option in OPTIONS:
        value = getattr(given, option.name, option.default)
        if option.flag in _OF_RUN and value != option.default:
            yield f"{option.flag}={value}"


def _elsewhere(given: argparse.Namespace, config: ModelConfig, sizes: ModelSizes, work: Workload) -> Planned:
    """On devices that a profile describes, weights as they are stored."""
    profile = load_profile(given.device_profile)
    form = WeightForm(dtype=given.dtype, stored=config.quantization)
    load = ModelLoad.of(sizes, form, given.kv_dtype)
    budgets = Budgets(device=(given.device_memory or profile.memory) * given.devices, host=given.host_memory,
                      weights=given.weight_memory, devices=given.devices)
    plan = plan_batches(load, Roofline(profile=profile, model=load, devices=given.devices), budgets, work)
    where = (("devices", f"{given.devices} x {profile.name}; rates from a description, so times are bounds and no "
                         "forecasts"),
             ("source", profile.source), *([("assumed", profile.assumed)] if profile.assumed else []))
    kept = f"as {given.dtype}" if form.stored is None else f"as they are stored ({form.stored.method})"
    return Planned(model_type=config.model_type, sizes=sizes, work=work, budgets=budgets, plan=plan,
                   weight_bytes=sizes.bytes(form), where=where, kept=kept)
