"""Command-line flags of the job: one table, read by Beam's option parser, the help text and the contract test.

Owns names, values and defaults of our flags and the refusal of unknown ones.  Beam's own flags (`--runner`, ...) mix
with ours.  Does not know what a flag does.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

# Beam offers no public parser of all its options; the name is stable within the pinned release.
from apache_beam.options.pipeline_options import PipelineOptions, _BeamArgumentParser

from batchgen_beam.errors import ErrorCode, OptionError
from batchgen_beam.settings import DTYPES, KERNELS, KV_DTYPES

__all__ = ["OPTIONS", "BatchgenOptions", "Option", "StrictParser", "add_options", "help_text", "parse_options",
           "parse_size"]

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")

MAX_SIZE = 2**60
"""Bytes; more is no machine's memory."""


def parse_size(text: str) -> int:
    """Bytes of a size such as `2GiB`, `1.5GB`, `512MiB` or `1048576`."""
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes or a number with KiB, MiB, GiB, KB, MB, GB")
    size = float(match[1]) * factor
    if size > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text if len(text) <= 40 else text[:40] + '...'} is over {MAX_SIZE} bytes")
    return int(size)


def _number(kind: type[int] | type[float], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}") from None

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = _listed(text) if text.startswith("[") else tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} holds an empty column name")
    return names


def _listed(text: str) -> tuple[str, ...]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of column names")
    return tuple(names)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(_integer(item.strip())) for item in text.split(","))


def _codes(text: str) -> tuple[ErrorCode, ...]:
    codes = {code.value: code for code in ErrorCode}
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in codes:
            raise argparse.ArgumentTypeError(f"{name!r} is no code of a failure; use some of {', '.join(codes)}")
    return tuple(codes[name] for name in names)


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is unknown; use one of {', '.join(names)}")
        return text
    return parse


_integer = _number(int, "integer")
_real = _number(float, "number")


@dataclass(frozen=True, slots=True)
class Option:
    """One flag.  `parse` None: a switch.  `repeat`: may be given several times, values are gathered.

    `bare`: what it stands for without a value; None: it needs one.
    """

    flag: str
    parse: Callable[[str], Any] | None
    help: str
    value: str = ""
    default: Any = None
    repeat: bool = False
    bare: Any = None

    @property
    def name(self) -> str:
        """The attribute under which Beam keeps the value."""
        return self.flag.removeprefix("--").replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flag."""
        if self.parse is None:
            parser.add_argument(self.flag, action="store_true", default=False, help=self.help)
        elif self.bare is not None:
            parser.add_argument(self.flag, type=self.parse, default=self.default, nargs="?", const=self.bare,
                                metavar=self.value or None, help=self.help)
        else:
            action = "append" if self.repeat else "store"
            parser.add_argument(self.flag, type=self.parse, default=self.default, action=action,
                                metavar=self.value or None, help=self.help)


OPTIONS = (
    Option("--input", str, "Parquet or JSONL: a file or a pattern; may be repeated", "PATTERN", repeat=True),
    Option("--output", str, "folder for results, failures and the run's report", "FOLDER"),
    Option("--model", str, "a model folder (config.json, safetensors, tokenizer.json) or a GGUF file, by path or URI: "
           "gs://, s3:// are copied by each host; file:/// and worker:/ are paths of every worker", "PATH"),
    Option("--model-cache", str, "where each host keeps models it copied and GGUF files it converted", "FOLDER",
           ".cache/converted"),
    Option("--model-facts", str, "what the launcher reads in place of the model, written by inspect --write-facts",
           "FOLDER"),
    Option("--chat-template", str, "a Jinja file that replaces the model's chat template", "FILE"),
    Option("--dtype", _one_of(DTYPES), f"arithmetic: {' or '.join(DTYPES)}", "NAME", "bfloat16"),
    Option("--kv-dtype", _one_of(KV_DTYPES), "what keys and values are kept in; int8: half the memory of bfloat16, "
           "other answers; auto: --dtype", "NAME", "auto"),
    Option("--kernels", _one_of(KERNELS), "native: compiled for the CPU; torch: any device; auto: native where it can "
           "be", "NAME", "auto"),
    Option("--threads", _integer, "threads of one engine, fixed for the run; 0: the cores that the process may "
           "use", "N", 0),
    Option("--max-rows", _integer, "rows that one engine runs at once", "N", 256),
    Option("--step-tokens", _integer, "tokens of one forward pass", "N", 512),
    Option("--prefill-chunk", _integer, "prompt tokens of one row in a forward pass; 0: the whole prompt", "N", 256),
    Option("--attention-batch", _integer, "rows whose attention is computed together; 0: all", "N", 0),
    Option("--expert-batch", _integer, "tokens that go through a layer's feed-forward part or its experts together; 0: "
           "all", "N", 0),
    Option("--kv-memory", parse_size, "memory for KV pages; default: a quarter of what is free", "SIZE"),
    Option("--kv-host-memory", parse_size, "memory of the second KV tier, for held rows; 0: off", "SIZE", 0),
    Option("--weight-memory", parse_size, "memory for weights; what does not fit is streamed from a packed copy in "
           "--model-cache; 0: all in memory", "SIZE", 0),
    Option("--max-context", _integer, "prompt + answer tokens of a row; default: the model's limit", "N"),
    Option("--tail-processes", _integer, "processes that compute a worker's last row together where a timing says that "
           "it is done sooner; 1: off", "N", 1),
    Option("--temperature", _real, "where a row has none; default: the model's generation_config.json, else 1", "X"),
    Option("--top-k", _integer, "where a row has none; 0: off", "N"),
    Option("--top-p", _real, "where a row has none", "X"),
    Option("--max-tokens", _integer, "answer tokens where a row has none; default: up to the context", "N"),
    Option("--seed", _integer, "seed of rows that bring none", "N", 0),
    Option("--logprobs", _integer, "alternatives to report for each token, 0 to 20", "N", 0),
    Option("--eos-ids", _ids, "token ids that end an answer, comma-separated; default: all that the model's files name",
           "IDS"),
    Option("--id-column", str, "the rows' ids; without such a column ids are made from positions", "NAME", "uuid"),
    Option("--prompt-column", str, "plain prompts", "NAME", "prompt"),
    Option("--messages-column", str, "chat messages: a list of turns, or its JSON text", "NAME", "messages"),
    Option("--token-ids-column", str, "prompts as token ids", "NAME", "token_ids"),
    Option("--keep-columns", _names, "columns to copy into the results, comma-separated", "NAMES", ()),
    Option("--ignore-columns", _names, "columns that are no parameters though they are named so", "NAMES", ()),
    Option("--accelerator", str, "what each worker that generates needs: type:nvidia-l4;count:1;install-nvidia-driver",
           "HINT"),
    Option("--worker-ram", parse_size, "memory that each worker that generates needs", "SIZE", 0),
    Option("--lanes", _integer, "streams of rows; 0: 4 for each worker slot, fewer for small inputs", "N", 0),
    Option("--rounds", _integer, "rounds of a run: what is left of each one's long tail is spread anew for the next; "
           "1: rows never move", "N", 1),
    Option("--limit", _integer, "read only the first N rows", "N"),
    Option("--allow-failures", None, "exit 0 although rows failed"),
    Option("--retry-failed", _codes, "try failed rows of earlier runs again: those of the codes, without a value all",
           "CODES", (), bare=tuple(ErrorCode)),
    Option("--new-fingerprint", None, "replace results that were made with other settings"),
    Option("--flush-interval", _real, "an answer is stored at most so long after it was found", "SECONDS", 30.0),
    Option("--checkpoint-interval", _real, "the state of a running row is stored this often, once it has grown",
           "SECONDS", 30.0),
    Option("--compact-after", _real, "journal files of ended runs are merged once they are this old", "SECONDS",
           3600.0),
    Option("--progress-interval", _real, "seconds between two progress reports of a worker", "SECONDS", 10.0),
)


class BatchgenOptions(PipelineOptions):
    """Our flags as Beam pipeline options."""

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        for option in OPTIONS:
            option.add_to(parser)


class StrictParser(argparse.ArgumentParser):
    """A parser whose complaints are `OptionError`s."""

    def error(self, message: str) -> NoReturn:
        """Refuse; argparse would end the process."""
        raise OptionError(message)


class _StrictBeamParser(StrictParser, _BeamArgumentParser):
    """The same for Beam's flags."""


def parse_options(flags: Sequence[str]) -> BatchgenOptions:
    """The options that `flags` give, ours and Beam's.

    Raises `OptionError` for an unknown flag and for a value that its flag does not take, both by name: Beam alone
    would go on with a warning.
    """
    parser = _StrictBeamParser(allow_abbrev=False, add_help=False)
    for cls in dict.fromkeys(PipelineOptions.__subclasses__()):
        cls._add_argparse_args(parser)
    _, unknown = parser.parse_known_args(list(flags))
    if unknown:
        raise OptionError(f"unknown flag or stray value: {' '.join(unknown)}; see batchgen-beam run --help")
    return BatchgenOptions(list(flags))


def add_options(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Declare some of our flags for another command."""
    for option in OPTIONS:
        if option.flag in flags:
            option.add_to(parser)


def help_text(command: str, description: str) -> str:
    """What `--help` of a command that takes these flags says."""
    parser = argparse.ArgumentParser(
        prog=f"batchgen-beam {command}", description=description,
        epilog="Beam's own flags (--runner, --direct_num_workers, ...) may be given too.")
    for option in OPTIONS:
        option.add_to(parser)
    return parser.format_help()
