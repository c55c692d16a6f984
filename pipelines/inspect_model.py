"""`batchgen-beam inspect`: what a model is, and whether it would run, without loading a tensor.

Owns the listing.  Does not know what makes a checkpoint valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from batchgen_beam.pipelines.options import StrictParser, add_options
from batchgen_beam.text.template import TemplateText
from batchgen_beam.transforms.model_facts import write_facts
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.model_store import resolve_model
from batchgen_beam.weights.checkpoint import CheckpointFacts, check_checkpoint
from batchgen_beam.weights.identity import weights_identity

__all__ = ["inspect_model"]


def inspect_model(flags: Sequence[str], stream: TextIO) -> None:
    """Write a model's facts; a `UserError` says why it would be refused."""
    parser = StrictParser(prog="batchgen-beam inspect", description="What a model is, and whether it would run.",
                          allow_abbrev=False)
    parser.add_argument("model", help="a model folder, a GGUF file, or a URI of either")
    parser.add_argument("--write-facts", metavar="FOLDER", help="write what --model-facts takes")
    add_options(parser, "--model-cache", "--chat-template")
    given = parser.parse_args(list(flags))
    folder = resolve_model(given.model, Path(given.model_cache))
    checkpoint = check_checkpoint(folder)
    template = None if given.chat_template is None else TemplateText.of_file(Path(given.chat_template))
    model = ModelFolder.open(folder, template=template, clock=datetime.now(UTC), max_context=None)
    if given.write_facts is not None:
        write_facts(folder, Path(given.write_facts))
    for name, value in _facts(model, checkpoint):
        stream.write(f"{name:<22}{value}\n")


def _facts(model: ModelFolder, checkpoint: CheckpointFacts) -> Iterator[tuple[str, object]]:
    config, template, defaults = model.config, model.template, model.defaults
    yield "folder", model.path
    yield "model type", config.model_type
    yield "layers", config.num_hidden_layers
    yield "hidden size", config.hidden_size
    yield "vocabulary", f"{config.vocab_size} ids, {model.text_vocabulary} with text"
    yield "context", f"{model.context_limit} tokens"
    yield "weights", f"{checkpoint.stored_bytes:,} bytes stored as {', '.join(checkpoint.dtypes) or 'nothing'}"
    yield "identity", weights_identity(model.path)
    yield "ignored tensors", ", ".join(checkpoint.ignored) or "none"
    yield "tied embeddings", config.tie_word_embeddings
    yield "BOS", "none" if model.tokenizer.bos_id is None else model.tokenizer.bos_id
    yield "EOS", ", ".join(map(str, sorted(model.eos_ids))) or "none: answers end by length only"
    yield "chat template", "none" if template is None else "yes, asks for the time" if template.uses_clock else "yes"
    yield "sampling defaults", f"temperature {defaults.temperature}, top_k {defaults.top_k}, top_p {defaults.top_p}"
    yield "not applied", ", ".join(defaults.unapplied) or "nothing"
