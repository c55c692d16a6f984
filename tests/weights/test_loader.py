"""Laws of loading: strict both ways, each tensor once, rounded once; and of the weights' identity."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from batchgen_beam.config.families.fake import FakeConfig
from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.families.qwen import Qwen2Config
from batchgen_beam.errors import CheckpointError
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.fake import FakeModel
from batchgen_beam.models.llama import LlamaModel
from batchgen_beam.weights import loader
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.headers import read_header
from batchgen_beam.weights.identity import weights_identity
from batchgen_beam.weights.loader import load_model
from batchgen_beam.weights.name_tables import expected_parameters
from tests.weights.tiny_checkpoint import tensors, write_config, write_shards, write_single


def test_shapes_name_tensor_and_both_shapes(tmp_path: Path) -> None:
    """A tensor of another shape than config.json asks for is refused with its name and both shapes."""
    stored = tensors()
    stored["model.layers.1.mlp.down_proj.weight"] = torch.zeros(8, 13)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight in .* has shape \[8, 13\], "
                                              r"config\.json asks for \[8, 12\]"):
        check_checkpoint(write_single(tmp_path, stored))


def test_ignored_names_are_listed(tmp_path: Path) -> None:
    """Rotary frequencies that old tools stored are left unread, and listed."""
    stored = tensors()
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    facts = check_checkpoint(write_single(tmp_path, stored | {name: torch.ones(1) for name in names}))
    assert list(facts.ignored) == names
    assert facts.stored_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert facts.dtypes == ("F32",)


@pytest.mark.parametrize("biased", [False, True])
def test_table_has_what_the_file_has(tmp_path: Path, biased: bool) -> None:
    """With biases announced, every projection has one; without, a stored bias is an unknown name."""
    config = LlamaConfig(attention_bias=biased, mlp_bias=biased, num_hidden_layers=3)
    names = [parameter.stored for parameter in expected_parameters(config)]
    assert len(names) == len(set(names)) == 3 + 3 * (9 + 7 * biased)
    stored = tensors() | {"model.layers.0.mlp.up_proj.bias": torch.ones(12)}
    with pytest.raises(CheckpointError, match=r"1 unknown \(model\.layers\.0\.mlp\.up_proj\.bias\)"):
        check_checkpoint(write_single(tmp_path, stored))


def test_a_type_without_a_table_is_refused() -> None:
    """Only the fake model has no tensors: a family whose table is not written yet can't pass with none."""
    assert expected_parameters(FakeConfig()) == ()
    with pytest.raises(CheckpointError, match=r"no table of tensors is written for model type 'qwen2'"):
        expected_parameters(Qwen2Config())


@pytest.mark.parametrize("write", [write_single, write_shards])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_arrives_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object,
                                              dtype: torch.dtype) -> None:
    """The model gets exactly the stored numbers, rounded once to the run's dtype, each name asked for once."""
    stored = tensors()
    folder = write(tmp_path, stored)  # type: ignore[operator]
    given: dict[str, torch.Tensor] = {}

    def record(config: object, get: object, kernels: object) -> object:
        for parameter in expected_parameters(config):  # type: ignore[arg-type]
            given[parameter.stored] = get(parameter.name)  # type: ignore[operator]
        return "model"

    monkeypatch.setattr(loader, "LlamaModel", record)
    assert load_model(folder, TorchKernels(dtype)) == "model"
    assert given.keys() == stored.keys()
    assert all(torch.equal(given[name], stored[name].to(dtype)) for name in stored)


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    """A loaded model does not look at its files again: they may be removed or overwritten."""
    folder = write_single(tmp_path, tensors())
    model = load_model(folder, TorchKernels(torch.float32))
    before = model._table_VD.clone()  # type: ignore[attr-defined]
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert torch.equal(model._table_VD, before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("names", [("embedding",), ("embedding", "embedding"), ("nonsense",)])
def test_a_model_that_asks_otherwise_is_our_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    names: tuple[str, ...]) -> None:
    """Asking twice, for an unknown name, or not for all parameters fails at once."""
    monkeypatch.setattr(loader, "LlamaModel", lambda config, get, kernels: [get(name) for name in names])
    with pytest.raises(AssertionError, match=r"asked for"):
        load_model(write_single(tmp_path, tensors()), TorchKernels(torch.float32))


def test_models_by_configuration(tmp_path: Path) -> None:
    """Tied and untied Llama and the fake model load; the fake one needs no weights."""
    kernels = TorchKernels(torch.float32)
    assert isinstance(load_model(write_shards(tmp_path / "a", tensors()), kernels), LlamaModel)
    tied = write_single(tmp_path / "b", tensors(head=False), tie_word_embeddings=True)
    assert isinstance(load_model(tied, kernels), LlamaModel)
    assert isinstance(load_model(write_config(tmp_path / "c", model_type="batchgen_fake"), kernels), FakeModel)


def test_weights_that_are_not_finite_load(tmp_path: Path) -> None:
    """Not a number in a weight is no fault of the folder: the rows that meet it fail by name."""
    stored = tensors()
    stored["model.norm.weight"][0] = float("nan")
    assert isinstance(load_model(write_single(tmp_path, stored), TorchKernels(torch.float32)), LlamaModel)


def test_identity_is_of_content(tmp_path: Path) -> None:
    """A copy elsewhere has the same identity; any changed value has another, in either kind of folder."""
    one = write_shards(tmp_path / "one", tensors())
    shutil.copytree(one, tmp_path / "two" / "DeepSeek-R1")
    assert weights_identity(one) == weights_identity(tmp_path / "two" / "DeepSeek-R1")
    (one / "notes.txt").write_text("not a weight")
    assert weights_identity(one) == weights_identity(tmp_path / "two" / "DeepSeek-R1")
    stored = tensors()
    stored["model.norm.weight"][3] += 1e-3
    assert weights_identity(write_shards(tmp_path / "three", stored)) != weights_identity(one)
    fake = write_config(tmp_path / "fake", model_type="batchgen_fake")
    assert weights_identity(fake) == weights_identity(write_config(tmp_path / "fake2", model_type="batchgen_fake"))


def test_identity_of_a_large_file_is_sampled(tmp_path: Path) -> None:
    """Over 8 MiB: the first bytes of every tensor and spread blocks count, so that a change in any tensor shows."""
    folder = write_single(tmp_path, tensors() | {"filler.a": torch.zeros(3 << 20), "filler.b": torch.zeros(3 << 20)})
    first = weights_identity(folder)
    file = folder / "model.safetensors"
    for name in ("model.norm.weight", "filler.b"):
        start = read_header(file)[name].start
        with file.open("r+b") as stream:
            stream.seek(start)
            stream.write(b"\x01")
        second = weights_identity(folder)
        assert second != first
        first = second

