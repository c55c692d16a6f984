"""What `batchgen-beam plan` says of this machine is what a run does: its flags go to the loader and the page budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from batchgen_beam.engine import layer_times
from batchgen_beam.engine.budget import page_budget
from batchgen_beam.engine.paging import pages_of, useful_pages
from batchgen_beam.errors import OptionError
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.pipelines.main import OK, USER_ERROR, main
from batchgen_beam.pipelines.options import parse_options
from batchgen_beam.pipelines.request import RunRequest
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights import disk_rate
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.tiered_loader import TieredModel, load_tiered, plan_copy
from batchgen_beam.weights.weight_needs import WeightNeeds
from tests.determinism.models import native_kernels
from tests.kernels.sets import NEEDS_NATIVE
from tests.models import tiny_llama
from tests.models.tiny import TINIES, random_model

ROWS, PROMPT, OUTPUT = 8, 70, 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a kernel set, with what it keeps between plans."""

    folder: Path
    kernels: KernelSet
    needs: WeightNeeds

    def plan(self, *flags: str) -> list[str]:
        """The command."""
        return ["plan", f"--model={self.folder}", f"--model-cache={self.folder.parent}", f"--rows={ROWS}",
                f"--prompt-tokens={PROMPT}", f"--output-tokens={OUTPUT}", "--device-memory=1GiB", "--threads=1",
                f"--kernels={self.kernels.name}", f"--dtype={str(self.kernels.dtype).removeprefix('torch.')}", *flags]

    def load(self, limit: int) -> TieredModel:
        """As a run does."""
        return load_tiered(self.folder, self.kernels, packing_of(self.kernels), limit=limit, cache=self.folder.parent)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Case]:
    """By the names of model and kernel set."""
    def get(name: str, kernels: str) -> Case:
        folder = tmp_path_factory.mktemp("plan") / "model"
        if name == "llama":
            torch.manual_seed(0)
            LlamaForCausalLM(tiny_llama.TINIES["mlp_bias, eps 1e-2"].config()).save_pretrained(folder)
        else:
            random_model(TINIES[name], 0).save_pretrained(folder)
        chosen = TorchKernels(torch.float32) if kernels == "torch" else native_kernels(torch.bfloat16, threads=1)
        _, needs = plan_copy(check_checkpoint(folder), chosen, packing_of(chosen))
        return Case(folder=folder, kernels=chosen, needs=needs)

    return cache(get)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed does not matter here."""
    monkeypatch.setattr(disk_rate, "SAMPLE_BYTES", disk_rate.PIECE_BYTES)
    monkeypatch.setattr(layer_times, "ROWS", (1, 2))
    monkeypatch.setattr(layer_times, "PROMPTS", (1, 2))


def table(text: str) -> dict[str, list[int]]:
    """Bytes in memory and on the disk, by line."""
    return {line[:28].strip(): [int(number.replace(",", "")) for number in line[28:].split()]
            for line in text.splitlines() if re.fullmatch(r".{28}( +[\d,]+)+", line)}


def request(text: str) -> EngineSettings:
    """What `run` makes of the printed flags."""
    flags = re.findall(r"^run with +(.*)$", text, re.M)[0].split()
    return RunRequest.of(parse_options(["--input=a", "--output=b", "--model=c", *flags])).engine


def holds(case: Case, settings: EngineSettings) -> None:
    """Pages for all rows at their end, in every cache group."""
    model = case.load(1 << 60).model
    budget = page_budget(model, settings)
    assert settings.max_rows == ROWS
    for group, pages in budget.device.items():
        most = useful_pages(group.window, ROWS, model.context_limit)
        assert pages - 1 >= min(most, ROWS * pages_of(PROMPT + OUTPUT)), group


MODELS = pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss"])
SETS = pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=NEEDS_NATIVE)])


@MODELS
@SETS
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_a_run_puts_weights_where_the_plan_says(name: str, kernels: str, share: float,
                                                cases: Callable[[str, str], Case],
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """From the least limit that a run accepts to all in memory: the loader takes the printed limit, keeps, streams and
    buffers as many bytes as the table says, the printed KV memory holds the rows, and no batch is chosen anew."""
    case = cases(name, kernels)
    least, whole = case.needs.least(), case.needs.total_bytes
    limit = round(least + share * (whole - least))
    assert main(case.plan(f"--weight-memory={limit}")) == OK
    text = capsys.readouterr().out
    found, settings = table(text), request(text)
    assert (settings.weight_memory > 0) is (share < 1)
    assert settings.left_open == (("attention_batch",) if share == 1 else ())
    residency = case.load(settings.weight_memory or whole).residency
    assert found["weights always needed"] == [residency.fixed_bytes, 0]
    assert found["weights of layers"] == [residency.resident_bytes, residency.streamed_bytes]
    assert found["buffers for weights"][0] == residency.total_bytes - residency.fixed_bytes - residency.resident_bytes
    assert residency.total_bytes <= limit
    assert f"{whole:,} bytes as" in text
    holds(case, settings)


@MODELS
@SETS
def test_what_a_run_refuses_has_no_plan(name: str, kernels: str, cases: Callable[[str, str], Case],
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """A byte under the least limit, both refuse and say what would do."""
    case = cases(name, kernels)
    least = case.needs.least()
    assert main(case.plan(f"--weight-memory={least - 1}")) == USER_ERROR
    assert (f"the least one needs {least:,} bytes of weight memory (there are {least - 1:,}); raise --weight-memory"
            in capsys.readouterr().err)
    with pytest.raises(OptionError, match=f"at least {least:,} bytes"):
        case.load(least - 1)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_memory_for_all_is_shared_out_so_that_a_run_accepts_it(name: str, cases: Callable[[str, str], Case],
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    """With less memory than everything takes and no limit for weights, the plan gives one that the loader takes."""
    case = cases(name, "torch")
    assert main(case.plan(f"--weight-memory={case.needs.least()}")) == OK
    together = table(capsys.readouterr().out)["together"][0]
    assert main(case.plan(f"--device-memory={together}")) == OK
    text = capsys.readouterr().out
    settings = request(text)
    assert table(text)["together"][0] <= together
    assert case.load(settings.weight_memory).residency.streamed_bytes == table(text)["weights of layers"][1] > 0
    holds(case, settings)
