"""`batchgen-beam plan`: what a model and a workload need, and how long they take, before anything is loaded.

Owns the flags and the report.  Does not know how a plan is found, or where costs come from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TextIO

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_registry import load_config, load_config_file
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import ModelSizes, WeightForm
from batchgen_beam.engine.device_profile import load_profile, profile_names
from batchgen_beam.engine.layer_graph import Resource
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.engine.planner import BatchPlan, plan_batches
from batchgen_beam.engine.roofline import Roofline
from batchgen_beam.engine.tiers import Budgets, Tier, Workload
from batchgen_beam.errors import OptionError
from batchgen_beam.pipelines.options import StrictParser, add_options, parse_size
from batchgen_beam.settings import InputColumns
from batchgen_beam.text.template import TemplateText
from batchgen_beam.transforms.input_lengths import input_lengths
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.model_store import resolve_model

__all__ = ["plan_model"]


def plan_model(flags: Sequence[str], stream: TextIO) -> None:
    """Write the plan; a `UserError` says what can't fit, with the numbers, or what is missing."""
    given = _parser().parse_args(list(flags))
    if given.model is None:
        raise OptionError("--model is missing; give a model folder, a GGUF file, a config.json or a public model name")
    config = _config(given)
    work = _workload(given)
    sizes = model_sizes(config)
    profile = load_profile(given.device_profile)
    form = WeightForm(dtype=given.dtype, stored=config.quantization)
    load = ModelLoad.of(sizes, form, given.kv_dtype)
    device = (given.device_memory or profile.memory) * given.devices
    budgets = Budgets(device=device, host=given.host_memory, weights=given.weight_memory, devices=given.devices)
    plan = plan_batches(load, Roofline(profile=profile, model=load, devices=given.devices), budgets, work)
    lines = [
        ("model", f"{config.model_type}, {sizes.parameters / 1e9:,.1f} billion parameters, a token meets "
                  f"{sizes.active_parameters / 1e9:,.1f}"),
        ("weights", f"{sizes.bytes(form):,} bytes {_kept(form)}"),
        ("devices", f"{given.devices} x {profile.name}; rates of the data sheet, so times are bounds, no forecasts"),
        ("source", profile.source), *([("assumed", profile.assumed)] if profile.assumed else []),
        ("workload", f"{work.rows:,} rows, prompts of {work.prompt_tokens:,} and answers of {work.output_tokens:,} "
                     "tokens in the mean")]
    for name, value in lines:
        stream.write(f"{name:<12}{value}\n")
    stream.write("\n")
    stream.writelines(f"{line}\n" for line in _memory(plan, budgets))
    stream.write("\n")
    for name, value in _expected(plan, load, sizes, work, given.price_per_hour):
        stream.write(f"{name:<12}{value}\n")


def _parser() -> StrictParser:
    parser = StrictParser(prog="batchgen-beam plan", allow_abbrev=False,
                          description="What a model and a workload need, and how long they take.")
    add_options(parser, "--model", "--model-cache", "--chat-template", "--input", "--limit", "--dtype", "--kv-dtype",
                "--id-column", "--prompt-column", "--messages-column", "--token-ids-column")
    parser.add_argument("--rows", type=_count, metavar="N", help="rows to answer")
    parser.add_argument("--prompt-tokens", type=_count, metavar="MEAN", help="tokens of a prompt in the mean")
    parser.add_argument("--output-tokens", type=_count, metavar="MEAN", help="tokens of an answer in the mean")
    parser.add_argument("--device-profile", metavar="NAME", required=True,
                        help=f"a device by its rates: {', '.join(profile_names())}, or a JSON file of that form")
    parser.add_argument("--devices", type=_count, metavar="N", default=1, help="how many of them")
    parser.add_argument("--device-memory", type=parse_size, metavar="SIZE", help="of each; default: the profile's")
    parser.add_argument("--host-memory", type=parse_size, metavar="SIZE", default=0,
                        help="for weights, keys and values that the devices do not hold")
    parser.add_argument("--weight-memory", type=parse_size, metavar="SIZE",
                        help="what of the devices' memory weights and their buffers may take")
    parser.add_argument("--price-per-hour", type=float, metavar="X", help="of all devices together")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


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


def _kept(form: WeightForm) -> str:
    return f"as {form.dtype}" if form.stored is None else f"as they are stored ({form.stored.method})"


def _memory(plan: BatchPlan, budgets: Budgets) -> Iterator[str]:
    """A table of bytes: what lies where."""
    placed = plan.placement
    yield f"{'bytes':<28}{'devices':>20}{'host':>20}{'disk':>20}"
    for name, *sizes in (
            ("weights always needed", placed.fixed, 0, 0),
            ("weights of layers", placed.resident, placed.host_weights, placed.disk_weights),
            ("buffers for weights", placed.buffers, placed.host_buffers, 0),
            ("keys and values", placed.kv_device, placed.kv_host, 0),
            ("workspace of a pass", placed.workspace, 0, 0),
            ("together", placed.device, placed.host, placed.disk_weights)):
        yield f"{name:<28}" + "".join(f"{size:>20,}" for size in sizes)
    yield f"{'there are':<28}{budgets.device:>20,}{budgets.host:>20,}"


def _expected(plan: BatchPlan, load: ModelLoad, sizes: ModelSizes, work: Workload,
              price: float | None) -> Iterator[tuple[str, str]]:
    choice = plan.choice
    yield "attention", f"in sub-batches of {min(choice.b_attn, plan.rows):,} rows (prompts: {choice.b_attn:,} tokens)"
    yield "experts" if any(layer.experts for layer in load.layers) else "layers", (
        f"once for {plan.rows:,} rows (prompts: {choice.b_moe:,} tokens)")
    yield "layers", _layers(plan)
    yield "why", _reason(plan)
    yield "step", f"{plan.step:.3g} s; a pass over prompts {plan.prompt_pass:.3g} s"
    speed = work.rows * work.output_tokens / plan.seconds
    yield "expected", (f"{speed:,.0f} answer tokens/s, {timedelta(seconds=round(plan.seconds))} until the last row; "
                       "long tails are left out")
    if price is not None:
        hours = plan.seconds / 3600
        yield "cost", f"{hours * price:,.2f} at {price:g} an hour, {hours * price / work.rows * 1000:,.4f} per 1,000 rows"


def _layers(plan: BatchPlan) -> str:
    counts = {tier: plan.placement.tiers.count(tier) for tier in Tier}
    said = f"{counts[Tier.DEVICE]} on the devices, {counts[Tier.HOST]} from the host, {counts[Tier.DISK]} from the disk"
    if not counts[Tier.HOST] + counts[Tier.DISK]:
        return said
    choice = plan.choice
    what = "chosen experts only" if choice.on_demand else "ahead of use"
    return f"{said}; each in {choice.chunks} pieces through {choice.buffers} buffers, {what}"


def _reason(plan: BatchPlan) -> str:
    """What a step waits for, and what it costs beside that."""
    busiest = plan.bottleneck
    others = ", ".join(f"{name} {plan.busy[name]:.3g} s" for name in Resource
                       if name is not busiest and plan.busy[name])
    tail = f"; beside it {others}" if others else ""
    return f"{busiest} takes {plan.busy[busiest]:.3g} s of a step of {plan.step:.3g} s{tail}"
