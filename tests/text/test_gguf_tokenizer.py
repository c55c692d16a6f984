"""Tokenizers made from GGUF metadata, against references that other code builds from the same lists."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers

from batchgen_beam.errors import CheckpointError
from batchgen_beam.text.gguf_tokenizer import write_tokenizer
from batchgen_beam.text.model_files import ModelDefaults
from batchgen_beam.text.pretokenizers import pretokenization
from batchgen_beam.text.tokenizer import Tokenizer
from batchgen_beam.weights.gguf_metadata import GgufHyperparameters, GgufMetadata, GgufTokenizer, read_metadata
from tests.text.varied import TEXTS, varied_texts

SIZES = GgufHyperparameters(context_length=64, embedding_length=8, block_count=1, feed_forward_length=8, head_count=1,
                            head_count_kv=1, head_size=8, rms_epsilon=1e-5, rope_theta=1e4, rope_scaling=None)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LLAMA3 = (ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {"gpt-2": [GPT2], "olmo": [GPT2], "smollm": [r"\p{N}", GPT2], "starcoder": [r"\p{N}", GPT2],
            "llama-bpe": [LLAMA3], "qwen2": [QWEN2], "tekken": [TEKKEN]}


def byte_level_facts(**changes: object) -> GgufMetadata:
    """A GGUF description of a small byte-level vocabulary, with two unused tokens at its end."""
    merges = ["Ġ t", "h e", "Ġt he", "1 1"]
    controls = ["<|endoftext|>", "<s>", "<|im_end|>", "<tool>"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    types = (3, 3, 3, 4, *(1 for _ in pieces), 5, 5)
    facts = GgufTokenizer(
        model="gpt2", pre="smollm", tokens=(*controls, *pieces, "[PAD1]", "[PAD2]"), token_types=types,
        merges=tuple(merges), scores=(), bos_id=1, eos_id=2, eot_id=None, eom_id=None, unknown_id=None, padding_id=2,
        add_bos=None, add_space_prefix=None, chat_template="{{ messages[0].content }}")
    return GgufMetadata(architecture="llama", name="tiny", hyperparameters=SIZES, tokenizer=replace(facts, **changes))


def sentence_piece_facts(**changes: object) -> GgufMetadata:
    """A GGUF description of a small SentencePiece vocabulary: byte pieces, letters, and joins with falling scores."""
    joins = ["he", "th", "▁t", "in", "▁the", "an", "▁▁", "ing", "the", "er", "▁▁▁▁", "aa", "aaa"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "日"]
    tokens = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joins, *letters)
    kinds = (2, 3, 3, *([6] * 256), *([1] * (len(joins) + len(letters))))
    scores = (*([0.0] * 259), *(-float(i) for i in range(len(joins) + len(letters))))
    facts = GgufTokenizer(
        model="llama", pre=None, tokens=tokens, token_types=kinds, merges=(), scores=scores, bos_id=1, eos_id=2,
        eot_id=None, eom_id=None, unknown_id=0, padding_id=None, add_bos=None, add_space_prefix=None,
        chat_template=None)
    return GgufMetadata(architecture="llama", name="tiny", hyperparameters=SIZES, tokenizer=replace(facts, **changes))


def written(metadata: GgufMetadata, folder: Path) -> Tokenizer:
    """The tokenizer of a folder that was made from the metadata."""
    write_tokenizer(metadata, folder)
    return Tokenizer.load(folder)


def cut(text: str, patterns: list[str]) -> list[str]:
    """Split at every match of each pattern in turn; what lies between matches stays as it is."""
    parts = [text]
    for pattern in patterns:
        parts = [piece for part in parts for piece in regex.split(f"({pattern})", part, flags=regex.V0) if piece]
    return parts


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pre_tokenizer_cuts_as_its_patterns_say(name: str) -> None:
    """A named pre-tokenizer cuts 1,000 texts where the published patterns do, by another regex engine."""
    built = pretokenization(name).build()
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in varied_texts(1000):
        wanted = [to_bytes.pre_tokenize_str(part)[0][0] for part in cut(text, PATTERNS[name])]
        assert [piece for piece, _ in built.pre_tokenize_str(text)] == wanted, text


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> GgufMetadata:
    """What the demo model's file says about itself."""
    return read_metadata(smollm2_gguf)


@pytest.mark.smollm2
def test_smollm2_tokenizes_as_an_independent_reference(smollm2: GgufMetadata, tmp_path: Path) -> None:
    """1,000 varied texts get the ids of a reference built from the raw lists; without digit splitting they do not."""
    made = written(smollm2, tmp_path)
    facts = smollm2.tokenizer

    def reference(*steps: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
        vocabulary = dict(zip(facts.tokens, range(len(facts.tokens)), strict=True))
        built = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in facts.merges]))
        built.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
        named = [token for token, kind in zip(facts.tokens, facts.token_types, strict=True) if kind == 3]
        built.add_special_tokens([AddedToken(token, normalized=False) for token in named])
        return built

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    right = reference(pre_tokenizers.Digits(individual_digits=True), gpt2)
    without_digits = reference(gpt2)
    texts = varied_texts(1000)
    assert len(set(texts)) == 1000
    for text in texts:
        assert made.encode(text, add_bos=True).tolist() == right.encode(text).ids, text
    differing = sum(right.encode(text).ids != without_digits.encode(text).ids for text in texts)
    assert differing > 50, "digits after blanks are where digit splitting shows: the vocabulary joins no two digits"


@pytest.mark.smollm2
def test_smollm2_files(smollm2: GgufMetadata, tmp_path: Path) -> None:
    """The demo model adds no BOS, ends a turn at <|im_end|>, keeps text whole, and has a template and no defaults."""
    made = written(smollm2, tmp_path)
    assert (made.vocabulary_size, made.bos_id, made.prefix) == (49152, 1, ())
    assert made.eos_ids(tmp_path) == {0, 2}
    assert ModelDefaults.load(tmp_path) == ModelDefaults()
    assert "<|im_start|>" in (tmp_path / "chat_template.jinja").read_text(encoding="utf-8")
    for text in TEXTS:
        if not any(special in text for special in smollm2.tokenizer.tokens[:17]):
            assert made.decode(made.encode(text, add_bos=True)) == text


def naive_pieces(text: str, facts: GgufTokenizer) -> list[str]:
    """SentencePiece's own rule: join the best-scored neighbours, the leftmost first, until none joins."""
    scores = {token: score for token, score, kind in zip(facts.tokens, facts.scores, facts.token_types, strict=True)
              if kind == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joins:
            return [p for part in parts for p in
                    ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])]
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.lists(st.sampled_from([" the", "thing", " ", "  ", "aaaa", "a", "er", "日本", "é", "\n", "1", "inhe", "X"]),
                max_size=30).map("".join))
def test_sentence_piece_joins_as_scores_say(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Merges read off the scores give the pieces of SentencePiece's own rule, unknown characters as bytes."""
    metadata = sentence_piece_facts()
    made = written(metadata, tmp_path_factory.mktemp("spm"))
    tokens = metadata.tokenizer.tokens
    assert [tokens[i] for i in made.encode(text, add_bos=False)] == naive_pieces(text, metadata.tokenizer)
    assert made.decode(made.encode(text, add_bos=True)) == text


def test_sentence_piece_settings(tmp_path: Path) -> None:
    """A BOS is put first unless the file denies it; without a space prefix nothing is put before or taken off."""
    made = written(sentence_piece_facts(), tmp_path)
    assert made.encode("the", add_bos=True)[0] == 1
    bare = written(sentence_piece_facts(add_bos=False, add_space_prefix=False), tmp_path)
    assert bare.encode("a", add_bos=True).tolist() == [sentence_piece_facts().tokenizer.tokens.index("a")]
    assert bare.decode(bare.encode(" a", add_bos=True)) == " a"


def test_byte_level_files(tmp_path: Path) -> None:
    """Control tokens are special, user-defined ones have text, unused ones at the end are no vocabulary."""
    made = written(byte_level_facts(), tmp_path)
    assert made.vocabulary_size == 264
    assert made.decode(made.encode("<s> the<tool>11<|im_end|>", add_bos=True)) == " the<tool>11"
    assert len(made.encode("11", add_bos=True)) == 2
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", "<|im_end|>", False)
    assert made.eos_ids(tmp_path) == {0, 2}
    assert (tmp_path / "chat_template.jinja").read_text(encoding="utf-8") == "{{ messages[0].content }}"


def test_ends_of_turn_and_message_count(tmp_path: Path) -> None:
    """Ends of turn and of message end an answer, too."""
    assert written(byte_level_facts(eot_id=3, eom_id=1), tmp_path).eos_ids(tmp_path) == {0, 1, 2, 3}


def test_a_pre_tokenizer_may_imply_a_bos(tmp_path: Path) -> None:
    """Llama 3's adds a BOS where the file does not say; what the file says wins."""
    assert written(byte_level_facts(pre="llama-bpe"), tmp_path).prefix == (1,)
    assert written(byte_level_facts(pre="llama-bpe", add_bos=False), tmp_path).prefix == ()
    assert written(byte_level_facts(add_bos=True), tmp_path).prefix == (1,)


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert'"),
    ({"pre": None}, r"no tokenizer\.ggml\.pre"),
    ({"pre": "gpt-4o"}, r"tokenizer\.ggml\.pre names the pre-tokenizer 'gpt-4o'"),
    ({"tokens": ()}, r"tokenizer\.ggml\.tokens is missing"),
    ({"token_types": (1,)}, r"tokenizer\.ggml\.token_type has 1 entries for 266"),
    ({"merges": ()}, r"tokenizer\.ggml\.merges is missing"),
    ({"merges": ("Ġ t", "x",)}, r"tokenizer\.ggml\.merges\[1\] is 'x'"),
    ({"merges": ("q z",)}, r"tokenizer\.ggml\.merges\[0\] is 'q z'"),
    ({"eos_id": None}, r"tokenizer\.ggml\.eos_token_id is missing"),
    ({"eos_id": 999}, r"tokenizer\.ggml\.eos_token_id is 999"),
    ({"bos_id": None, "add_bos": True}, r"tokenizer\.ggml\.bos_token_id is missing"),
])
def test_byte_level_faults(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """Metadata that is missing, wrong or of an unknown kind is refused, naming its key."""
    with pytest.raises(CheckpointError, match=words):
        write_tokenizer(byte_level_facts(**changes), tmp_path)


@pytest.mark.parametrize(("changes", "words"), [
    ({"scores": ()}, r"tokenizer\.ggml\.scores has 0 entries"),
    ({"unknown_id": None}, r"tokenizer\.ggml\.unknown_token_id is missing"),
    ({"tokens": tuple(f"t{i}" for i in range(300)), "token_types": (1,) * 300, "scores": (0.0,) * 300},
     r"no piece <0x00>"),
    ({"tokens": ("a", "a"), "token_types": (1, 1)}, r"holds 'a' twice"),
])
def test_sentence_piece_faults(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    """What a SentencePiece vocabulary lacks is named."""
    with pytest.raises(CheckpointError, match=words):
        write_tokenizer(sentence_piece_facts(**changes), tmp_path)
