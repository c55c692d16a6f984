"""A model folder's tokenizer: what is refused, what is ignored, and what its identity covers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from batchgen_beam.errors import CheckpointError, RowError
from batchgen_beam.text.tokenizer import Tokenizer
from tests.text.tiny import BOS, EOS, byte_level, save, with_bos, write_json


@pytest.mark.parametrize("other", [None, "tokenizer.model", "tiktoken.model", "tekken.json"])
def test_a_folder_without_tokenizer_json_is_refused_by_name(tmp_path: Path, other: str | None) -> None:
    """Formats that are not read are named, with the remedy."""
    if other is not None:
        (tmp_path / other).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"no tokenizer\.json, .*{other or 'no tokenizer at all'}.*convert"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[1]"])
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    """A file that can't be read is the checkpoint's error."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        Tokenizer.load(tmp_path)


def test_inconsistent_files_are_refused_by_name(tmp_path: Path) -> None:
    """A BOS that is asked for but unknown, settings of a wrong type, and a missing unknown token are found at start."""
    with pytest.raises(CheckpointError, match=r"bos_token '<nope>' is not in the vocabulary"):
        save(tmp_path, byte_level(), bos_token="<nope>", add_bos_token=True)
    with pytest.raises(CheckpointError, match=r"config\.json: add_bos_token must be true or false, got 'yes'"):
        save(tmp_path, byte_level(), add_bos_token="yes")
    with pytest.raises(CheckpointError, match=r"eos_token must be a text, got 7"):
        save(tmp_path, byte_level(), eos_token=7)
    with pytest.raises(CheckpointError, match=r"unknown text '\[UNK\]' is not in the vocabulary"):
        save(tmp_path, Backend(models.WordLevel({"a": 0}, unk_token="[UNK]")))


def test_a_unigram_model_needs_an_unknown_id(tmp_path: Path) -> None:
    """Without one its first unknown character could not be encoded: the folder is refused; with one it has ids."""
    pieces = [("<unk>", 0.0), ("a", -1.0)]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the Unigram model has no unk_id"):
        save(tmp_path, Backend(models.Unigram(pieces)))
    tokenizer = save(tmp_path, Backend(models.Unigram(pieces, unk_id=0)))
    assert tokenizer.encode("axa", add_bos=False).tolist() == [1, 0, 1]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    """A tokenizer.json that was saved with truncation or padding cuts and pads no prompt."""
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=20)
    ids = save(tmp_path, backend).encode("xxxxxxxx", add_bos=False)
    assert len(ids) == 8


def test_special_tokens_as_objects_and_in_the_older_file(tmp_path: Path) -> None:
    """A special token may be a text or an object with content, in tokenizer_config.json or special_tokens_map.json."""
    write_json(tmp_path / "special_tokens_map.json", {"pad_token": "<unk>", "bos_token": "ignored"})
    tokenizer = save(tmp_path, byte_level(), bos_token={"content": "<s>", "lstrip": False}, sep_token=None)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    assert tokenizer.bos_id == BOS
    assert tokenizer.eos_ids(tmp_path) == {EOS}


def test_a_post_processor_may_put_several_tokens_first(tmp_path: Path) -> None:
    """All that is put before a raw prompt is taken over, once; what would close the text is not."""
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<|im_start|> <s> $A </s>", special_tokens=[
        ("<|im_start|>", 3), ("<s>", 1), ("</s>", 2)])
    tokenizer = save(tmp_path, backend)
    assert tokenizer.prefix == (3, 1)
    assert tokenizer.encode("x", add_bos=True).tolist()[:2] == [3, 1]
    assert tokenizer.encode("<|im_start|><s>x", add_bos=True) == tokenizer.encode("x", add_bos=True)
    assert len(tokenizer.encode("x", add_bos=True)) == 3


def test_foreign_ids_and_special_tokens_give_no_text(tmp_path: Path) -> None:
    """Ids beyond the vocabulary or below 0 never crash a decode; special tokens are skipped."""
    tokenizer = save(tmp_path, byte_level())
    the = tokenizer.encode(" the", add_bos=False).tolist()
    assert tokenizer.decode([BOS, *the, 9999, -1, *the, EOS, 2**31 - 1]) == " the the"
    assert tokenizer.decode([]) == ""


def test_text_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A lone surrogate is INVALID_TEXT with its place."""
    with pytest.raises(RowError, match=r"INVALID_TEXT.*U\+DC00 at character 2"):
        save(tmp_path, byte_level()).encode("ab\udc00", add_bos=False)


def test_identity_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    """Equal files have equal identities wherever they are; a change in a file changes it."""
    one, two = (save(tmp_path / name, byte_level()) for name in ("one", "two"))
    assert one.identity == two.identity
    assert save(tmp_path / "three", with_bos(byte_level())).identity != one.identity
    assert save(tmp_path / "four", byte_level(), add_bos_token=False).identity != one.identity
