"""Laws of the native kernel set: right, blind to company and threads, and the same bits fused as one by one.

Attention's laws are in `test_paged_attention`, which runs for every set.
"""

from __future__ import annotations

import multiprocessing
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen_beam.engine.sampler import choose, uniform
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.self_test import AttentionShape, ModelShapes, check_invariance
from batchgen_beam.models.interface import BatchView, CacheKind, CacheSpec, GroupKey, run_layers
from batchgen_beam.models.sampling import SamplingLines
from batchgen_beam.records import SamplingParams
from batchgen_beam.weights.loader import load_model
from tests.kernels.sets import EMULATED, HIGHEST, NATIVE, NEEDS_NATIVE, NOT_SANITIZED, native
from tests.kernels.test_torch_set import ULP, normal, rows_agree
from tests.kernels.views import PAGE, tables, view
from tests.models.paged import PagedRun, greedy
from tests.models.tiny_llama import TINIES, Tiny, make_reference

pytestmark = NEEDS_NATIVE
EACH = pytest.mark.parametrize(("dtype", "path"), NATIVE + EMULATED)
SHAPES = [(960, 576), (576, 1536), (40, 24), (33, 6), (1, 2), (97, 1024)]
ODD = Tiny(keys={"hidden_size": 78, "intermediate_size": 102, "head_dim": 48, "num_attention_heads": 6,
                 "num_key_value_heads": 3, "vocab_size": 331, "attention_bias": True, "mlp_bias": True})
WIDE = Tiny(keys={"hidden_size": 90, "intermediate_size": 130, "head_dim": 80, "num_attention_heads": 5,
                  "num_key_value_heads": 1, "tie_word_embeddings": True})


@EACH
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right_and_rounded_once(dtype: torch.dtype, path: str, shape: tuple[int, int]) -> None:
    """Against float64, two weights side by side with biases, in shapes that no panel and no block of rows divides."""
    outputs, inputs = shape
    kernels = native(dtype, path)
    x, w, v, b, c = (normal(*size, seed=i, dtype=dtype) for i, size in enumerate(
        [(29, inputs), (outputs, inputs), (7, inputs), (outputs,), (7,)]))
    exact = x.double() @ torch.cat((w, v)).double().T + torch.cat((b, c)).double()
    error, other = ((kernels.linear(x, kernels.pack([w, v], biases=[bias, c])).double() - exact).abs()
                    for bias in (b, b + 0.125))
    # One chain of K additions to sums under 6 sqrt(K), each of which errs by half an ulp of its float32 sum.
    bound = exact.abs() * ULP[dtype] / 2 + inputs**0.5 * 6 * inputs**0.5 * 2.0**-24
    assert (error <= bound).all()
    assert not (other <= bound).all(), "another bias would pass"


@EACH
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_a_product_row_depends_on_itself_alone(dtype: torch.dtype, path: str, shape: tuple[int, int]) -> None:
    """No bit of a row depends on the number of rows, on its place among them, or on the number of threads."""
    outputs, inputs = shape
    weight = native(dtype, path).pack([normal(outputs, inputs, seed=1)])
    x = normal(200, inputs, dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        kernels = native(dtype, path, threads)
        assert rows_agree(lambda rows, kernels=kernels: kernels.linear(rows, weight), x)
        results.append(kernels.linear(x, weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@EACH
def test_lines_follow_their_formulas(dtype: torch.dtype, path: str) -> None:
    """Norm, activation and rotation against float64, in widths that no vector divides."""
    kernels = native(dtype, path)
    x, w = normal(50, 76, dtype=dtype), normal(76, seed=1, dtype=dtype)
    wide, scale = x.double(), w.double()
    norm = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    gate, up = wide.chunk(2, -1)
    angle = torch.outer(torch.arange(50.0), 0.1 ** torch.arange(38.0))
    rotated = torch.polar(torch.ones_like(angle), angle).to(torch.complex128) * torch.complex(gate, up)
    found = kernels.rope(x[:, None], angle.cos(), angle.sin())[:, 0].double()
    turned = kernels.rope(x[:, None], (angle + 0.1).cos(), (angle + 0.1).sin())[:, 0].double()
    for got, wrong, exact in ((kernels.rms_norm(x, w, 1e-5).double(), kernels.rms_norm(x, w, 0.1).double(), norm),
                              (kernels.swiglu(x).double(), kernels.swiglu(x.roll(38, -1)).double(),
                               gate * torch.sigmoid(gate) * up),
                              (found, turned, torch.cat((rotated.real, rotated.imag), -1))):
        # A few float32 roundings of values under 16, the polynomial of exp and a sum of 76 squares; then the result's.
        bound = exact.abs() * ULP[dtype] / 2 + 16 * 2.0**-21
        assert ((got - exact).abs() <= bound).all()
        assert not ((wrong - exact).abs() <= bound).all(), "another epsilon, side or angle would pass"


def many_lines(kernels: NativeKernels) -> list[Tensor]:
    """Norms, activations, rotations and appended entries of enough lines to be shared among threads."""
    x, w, angle = normal(2100, 80, dtype=kernels.dtype), normal(80, seed=1, dtype=kernels.dtype), normal(2100, 20)
    rows = [range(700), range(60, 1460)]
    table_RP = tables([row.stop for row in rows], torch.Generator().manual_seed(1))
    found = [kernels.rms_norm(x, w, 1e-5), kernels.swiglu(x), kernels.rope(x.view(-1, 2, 40), angle.cos(), angle.sin())]
    for name in "kv":
        spec = CacheSpec(name=name, kind=CacheKind.PAGED, shape=(5, 16), dtype=kernels.kv_dtype)
        found.append(kernels.allocate(spec, table_RP.max() + 1, PAGE))
        kernels.append(found[-1], x.view(-1, 5, 16), spec, view(rows, table_RP, spec.group))
    return found


@EACH
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["", "int8"])
def test_many_lines_shared_among_threads_keep_their_bits(dtype: torch.dtype, path: str,
                                                         kv_dtype: torch.dtype | None) -> None:
    """One thread, two, three: the same bits, of which no line is left out."""
    alone, two, three = (many_lines(native(dtype, path, threads, kv_dtype=kv_dtype)) for threads in (1, 2, 3))
    for lines in (two, three):
        assert all(torch.equal(shared, one) for shared, one in zip(lines, alone, strict=True))


@EACH
def test_activations_far_from_zero(dtype: torch.dtype, path: str) -> None:
    """A gate of minus hundreds gives zero or next to it, of plus hundreds itself; nothing overflows."""
    gate = torch.tensor([[-1000.0, -100.0, -20.0, 0.0, 20.0, 100.0, 1000.0, -0.0]], dtype=dtype)
    found = native(dtype, path).swiglu(torch.cat((gate, torch.ones_like(gate)), -1))
    # bfloat16 rounds by 0.004; at -100 the result is 4e-42, below what the vectors' exponential can say.
    assert torch.allclose(found.double(), gate.double() * torch.sigmoid(gate.double()), rtol=0.005, atol=1e-30)


@EACH
def test_not_a_number_stays_one(dtype: torch.dtype, path: str) -> None:
    """In a product's row, in a norm and in an activation, and only there."""
    kernels = native(dtype, path)
    x = normal(5, 64, dtype=dtype)
    x[2, 7] = torch.nan
    for found in (kernels.linear(x, kernels.pack([normal(40, 64, seed=1)])), kernels.swiglu(x),
                  kernels.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5)):
        assert found[2].isnan().any()
        assert not found[[0, 1, 3, 4]].isnan().any()


@EACH
def test_appended_entries_stand_in_the_pages_of_their_row(dtype: torch.dtype, path: str) -> None:
    """Position p of row r is at (table[r, p / 64], p mod 64), keys with the tokens side by side; nothing else moves."""
    kernels = native(dtype, path)
    pair = 2 if dtype is torch.bfloat16 else 1
    rows = [range(60, 70), range(5), range(127, 128)]
    table = tables([row.stop for row in rows], torch.Generator().manual_seed(1))
    entries = normal(sum(map(len, rows)), 2, 16, dtype=dtype)
    for name in ("k", "v"):
        spec = CacheSpec(name=name, kind=CacheKind.PAGED, shape=(2, 16), dtype=dtype)
        cache = kernels.allocate(spec, 8, PAGE)
        kernels.append(cache, entries, spec, view(rows, table, GroupKey(CacheKind.PAGED)))
        assert cache.count_nonzero() == entries.count_nonzero()
        if name == "k":
            cache = cache.view(8, 2, 16 // pair, PAGE, pair).transpose(2, 3).reshape(8, 2, PAGE, 16)
        lines = iter(entries)
        for row, places in enumerate(rows):
            for place in places:
                assert torch.equal(cache[table[row, place // PAGE], :, place % PAGE], next(lines))


def wanting(whole_W: NDArray[np.bool_], eligible: int) -> BatchView:
    """A view of one-token rows of which only the wish for logits matters."""
    ends = torch.arange(len(whole_W))
    return BatchView(token_ids_T=ends, positions_T=ends, row_T=ends, offsets_R1=torch.arange(len(ends) + 1),
                     wanted_W=ends, whole_W=whole_W, eligible=eligible, page_tables={}, state_slots_R=ends[:0],
                     caches=())


def scored(kernels: NativeKernels, x: Tensor, weight: Tensor, whole: list[bool], eligible: int) -> tuple[Tensor, ...]:
    """Ids, log-probabilities, lines and logits of `scores`."""
    batch = wanting(np.array(whole), eligible)
    scores = kernels.scores(x, kernels.pack_head(weight), batch)
    return (*map(torch.from_numpy, (scores.ids_W, scores.logprobs_W, scores.line_W)), scores.logits_LV)


@EACH
@pytest.mark.parametrize("vocabulary", [5003, 31, 512])
def test_the_greatest_logit_needs_no_logits(dtype: torch.dtype, path: str, vocabulary: int) -> None:
    """Rows that ask for it get all logits; the others the greatest eligible id and its log-probability among all."""
    kernels = native(dtype, path, 2)
    x, weight = normal(40, 64, dtype=dtype), normal(vocabulary, 64, seed=1, dtype=dtype)
    whole = [i % 3 == 0 for i in range(40)]
    ids, logprobs, lines, logits = scored(kernels, x, weight, whole, vocabulary - 9)
    everything = kernels.head(x, kernels.pack_head(weight))
    assert torch.equal(logits, everything[torch.tensor(whole)])
    assert lines.tolist() == [i // 3 if i % 3 == 0 else -1 for i in range(40)]
    exact = torch.log_softmax(everything.double(), -1)
    for i in (i for i in range(40) if not whole[i]):
        assert ids[i] == everything[i, : vocabulary - 9].argmax()
        # Down to -8.4, by a float32 sum of up to 5,003 exponentials that err by 2^-22 each: measured is 5e-7.
        assert abs(float(logprobs[i]) - float(exact[i, ids[i]])) < 2e-6


@EACH
def test_ties_go_to_the_lowest_id_and_nan_is_told(dtype: torch.dtype, path: str) -> None:
    """Equal logits in different panels; not-a-number and infinity in a logit, eligible or not."""
    kernels = native(dtype, path)
    weight = normal(2000, 8, seed=1, dtype=dtype)
    weight[[77, 300, 1999]] = 9.0
    x = torch.ones(1, 8, dtype=dtype)
    ids, logprobs, _, _ = scored(kernels, x, weight, [False], 2000)
    assert ids.tolist() == [77]
    assert logprobs.isfinite().all()
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight[1500] = bad
        assert scored(kernels, x, weight, [False], 1000)[1].isnan().all()


@EACH
@pytest.mark.parametrize("base", [-1e30, -1e33, -3e38])
def test_logits_far_below_zero_have_a_greatest(dtype: torch.dtype, path: str, base: float) -> None:
    """Finite logits of any size: the greatest eligible id and its log-probability, in the first panel and later."""
    kernels = native(dtype, path)
    weight = torch.zeros(1500, 8, dtype=dtype)
    weight[:, 0] = base
    weight[[40, 700, 1400], 0] = base * torch.tensor([0.5, 0.25, 0.125], dtype=dtype)
    x = torch.ones(1, 8, dtype=dtype)
    for eligible, greatest in ((10, 0), (300, 40), (1000, 700), (1500, 1400)):
        ids, logprobs, _, _ = scored(kernels, x, weight, [False], eligible)
        logits = kernels.head(x, kernels.pack_head(weight))[0]
        assert ids.tolist() == [greatest]
        assert logprobs[0] == (logits[greatest].double() - logits.max().double()).float()


@EACH
def test_attention_with_scores_far_below_zero(dtype: torch.dtype, path: str) -> None:
    """Equal scores of -1e35 share evenly, over one key and over pages; a score that overflows has no share."""
    kernels = native(dtype, path)
    rows = [range(1), range(150)]
    table = tables([row.stop for row in rows], torch.Generator().manual_seed(1))
    specs = [CacheSpec(name=name, kind=CacheKind.PAGED, shape=(1, 16), dtype=dtype) for name in "kv"]
    caches = [kernels.allocate(spec, 8, PAGE) for spec in specs]
    batch = view(rows, table, GroupKey(CacheKind.PAGED))
    keys, values = torch.full((151, 1, 16), -1e15, dtype=dtype), normal(151, 1, 16, dtype=dtype)
    keys[1 : 1 + PAGE] = -1e30
    for spec, cache, entries in zip(specs, caches, (keys, values), strict=True):
        kernels.append(cache, entries, spec, batch)
    query = torch.full((151, 1, 16), 1e19, dtype=dtype)
    out = kernels.attention(query, *zip(specs, caches, strict=True), batch, 0.25)
    assert torch.equal(out[0], values[0])
    assert out[1 : 1 + PAGE].isnan().all()
    # A mean of 86 normal values is under 0.5 and is rounded to bfloat16, on some paths as 86 rounded shares as well.
    assert torch.allclose(out[-1].float(), values[1 + PAGE :].float().mean(0), rtol=0, atol=0.004)
    assert not torch.allclose(out[-1].float(), values[2 + PAGE :].float().mean(0), rtol=0, atol=0.004)


@EACH
def test_a_row_scores_the_same_in_any_company(dtype: torch.dtype, path: str) -> None:
    """Whoever else wants logits, and however many threads: the same id and log-probability bits."""
    x, weight = normal(300, 64, dtype=dtype), normal(5003, 64, seed=1, dtype=dtype)
    reference = scored(native(dtype, path, 1), x, weight, [False] * 300, 5000)
    others = scored(native(dtype, path, 3), x, weight, [i % 2 == 0 for i in range(300)], 5000)
    assert all(torch.equal(one[1::2], other[1::2]) for one, other in zip(reference[:2], others[:2], strict=True))
    for i in (0, 13, 299):
        alone = scored(native(dtype, path, 2), x[i : i + 1], weight, [False], 5000)
        assert (alone[0][0], alone[1][0]) == (reference[0][i], reference[1][i])


def test_choices_are_the_samplers() -> None:
    """Greedy rows without logits, and rows that are sampled or list alternatives, each as if alone."""
    dtype = torch.bfloat16
    kernels = native(dtype, HIGHEST[dtype])
    x, weight = normal(6, 64, dtype=dtype), normal(500, 64, seed=1, dtype=dtype)
    lines = SamplingLines.allocate(6)
    for i in range(6):
        lines.put(i, SamplingParams(temperature=[0.0, 0.9][i % 2], logprobs=[0, 0, 2][i % 3], seed=1), 99 + i)
    batch = wanting(lines.whole, 490)
    assert lines.whole.tolist() == [False, True, True, True, False, True]
    places = np.arange(6)
    mixed = choose(kernels, kernels.scores(x, kernels.pack_head(weight), batch), lines, places, 490)
    plain = kernels.sample(kernels.head(x, kernels.pack_head(weight)), lines, uniform(lines.stream, places), 490)
    assert mixed.ids_W.tolist() == plain.ids_W.tolist()
    assert np.allclose(mixed.logprobs_W, plain.logprobs_W, rtol=0, atol=5e-6)  # two exponentials, sums of 500
    assert np.array_equal(mixed.top_ids_WK[2], plain.top_ids_WK[2])
    assert not mixed.bad_W.any()


@EACH
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["", "int8"])
def test_the_self_test_passes(dtype: torch.dtype, path: str, kv_dtype: torch.dtype | None) -> None:
    """Every operation keeps the law on the shapes of a model, windows included."""
    shapes = ModelShapes(linear=((192, 1536), (576, 192)), head=(4099, 192), norms=(192,), activations=(288,),
                         attention=(AttentionShape(heads=6, kv_heads=2, size=32),
                                    AttentionShape(heads=6, kv_heads=2, size=32, window=100)))
    assert check_invariance(native(dtype, path, 2, kv_dtype=kv_dtype), shapes, longest=1024).failures == ()


def pages_of_text(model: object, kernels: NativeKernels) -> Tensor:
    """Logits of some rows in mixed chunks that cross pages; from 6 tokens at once, for which threads share out panels,
    to 360, of which one thread takes its share in two blocks."""
    run = PagedRun(model, kernels, page_tokens=PAGE)
    ids = [(7 * i * i + 3 * i) % 300 for i in range(200)]
    first = run.forward(("a", ids[:130]), ("b", ids[50:57]), every=True)
    second = run.forward(("b", ids[57:58]), ("a", ids[130:200]), every=True)
    many = run.forward(*((f"{i}", ids[i : i + 120]) for i in range(3)), every=True)
    few = run.forward(("b", ids[58:63]), ("a", ids[:1]), every=True)
    return torch.cat((first, second, many, few))


@EACH
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["", "int8"])
@pytest.mark.parametrize("tiny", [TINIES["plain"], ODD, WIDE], ids=["plain", "odd", "wide"])
def test_fused_and_one_by_one_give_the_same_bits(dtype: torch.dtype, path: str, kv_dtype: torch.dtype | None,
                                                 tiny: Tiny, tmp_path: Path) -> None:
    """One call for the whole pass, and its operations one by one; one thread, two, three."""
    make_reference(tiny, tmp_path / "model")
    results = []
    for threads in (1, 2, 3):
        kernels = native(dtype, path, threads, kv_dtype=kv_dtype)
        model = load_model(tmp_path / "model", kernels)
        results.append(pages_of_text(model, kernels))
    model.forward = lambda batch: run_layers(model, batch)
    results.append(pages_of_text(model, kernels))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("path", [path for dtype, path in NATIVE if dtype is torch.float32])
@pytest.mark.parametrize("name", [name for name in TINIES if "head_dim" not in name])
def test_parity_with_transformers(name: str, path: str, tmp_path: Path) -> None:
    """Every tiny checkpoint whose heads fit: logits within rounding in float32, the same greedy tokens."""
    reference = make_reference(TINIES[name], tmp_path / "model")
    kernels = native(torch.float32, path)
    model = load_model(tmp_path / "model", kernels)
    for prompt, logits, ids in zip(reference.prompts, reference.logits, reference.greedy, strict=True):
        found = PagedRun(model, kernels, page_tokens=PAGE).forward(("row", prompt), every=True)
        assert (found - logits).abs().max() < 1e-5  # measured are 2e-6 of logits up to 3
        assert greedy(PagedRun(model, kernels, page_tokens=PAGE), "row", prompt, len(ids)) == list(ids)


def _forked_child(found: multiprocessing.SimpleQueue[list[float]]) -> None:
    torch.set_num_threads(1)  # torch's own threads do not survive a fork: its next parallel region would hang
    _product(found)


def in_a_fork(child: Callable[[Any], None]) -> Any:
    """What a forked child puts into its queue."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=child, args=(found,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return found.get()


def _product(found: multiprocessing.SimpleQueue[list[float]]) -> None:
    dtype, path = NATIVE[0]
    kernels = native(dtype, path, 2)
    found.put(kernels.linear(normal(64, 96, dtype=dtype), kernels.pack([normal(64, 96, seed=1)]))[5].tolist())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_survive_a_fork() -> None:
    """A forked child has none of its parent's threads: it makes its own and gets the same bits."""
    here: multiprocessing.SimpleQueue[list[float]] = multiprocessing.SimpleQueue()
    _product(here)
    assert in_a_fork(_forked_child) == here.get()


def _starved_child(found: multiprocessing.SimpleQueue[tuple[str, bool]]) -> None:
    """A product on more threads than there is address space for, and again when there is."""
    torch.set_num_threads(1)  # torch's own threads do not survive a fork: its next parallel region would hang
    dtype, path = NATIVE[0]
    x, weight = normal(64, 96, dtype=dtype), normal(960, 96, seed=1)
    kernels = native(dtype, path, 60)
    packed = kernels.pack([weight])
    wanted = native(dtype, path, 1).linear(x, packed)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        kernels.linear(x, packed)
        message = "no error"
    except RuntimeError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    found.put((message, torch.equal(kernels.linear(x, packed), wanted)))


@NOT_SANITIZED
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_that_can_not_be_had_are_an_error() -> None:
    """The call raises and says what to do; once there is room, the same set gets the right bits."""
    message, same = in_a_fork(_starved_child)
    assert "lower the number of threads" in message
    assert same


def test_bad_shapes_are_refused_by_name() -> None:
    """What no path can compute: heads that fill no vector, odd inputs in bfloat16, foreign dtypes, unknown paths."""
    dtype, path = torch.bfloat16, HIGHEST[torch.bfloat16]
    with pytest.raises(ValueError, match="multiple of 16 values, not 24"):
        native(dtype, path).fits(24)
    with pytest.raises(ValueError, match="even number of inputs, not 7"):
        native(torch.bfloat16, path).pack([normal(4, 7)])
    with pytest.raises(ValueError, match=r"computes in torch\.bfloat16"):
        native(torch.bfloat16, path).rms_norm(normal(2, 8), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        native(torch.float16, path)
    with pytest.raises(ValueError, match="at least one thread, not 0"):
        native(dtype, path, 0)
    with pytest.raises(ValueError, match="no instruction path 'neon'"):
        native(dtype, "neon")


def test_facts_name_what_decides_the_bits() -> None:
    """Path, dtype and the C library, whose `exp` and `log` make log-probabilities, are part of the numeric print;
    threads are not, for they change no bit."""
    dtype, path = NATIVE[0]
    facts = native(dtype, path).facts()
    assert facts == native(dtype, path, 3).facts()
    assert {"kernels", "path", "version", "dtype", "torch"} <= facts.keys()
    assert facts["libc"] == " ".join(platform.libc_ver())
