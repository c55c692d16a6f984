"""Laws of experts on batches, of values inside key entries, and of sinks; and what the native set refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.experts import SILU, Activation, Expert, Routing
from batchgen_beam.models.interface import CacheKind, CacheSpec, GroupKey, KernelSet
from tests.kernels.sets import EVERY_SET, FLOAT32_SETS, HIGHEST, NATIVE, NEEDS_NATIVE, MakeKernels, native
from tests.kernels.views import PAGE, tables, view

COUNT, CHOSEN, SIZE, INNER = 6, 3, 40, 24
CLAMPED = Activation(alpha=1.702, limit=0.7, shift=1.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Looked(list[Expert]):
    """Experts that remember which of them were looked up."""

    def __init__(self, experts: list[Expert]) -> None:
        super().__init__(experts)
        self.ids: list[int] = []

    @overload
    def __getitem__(self, index: int) -> Expert: ...

    @overload
    def __getitem__(self, index: slice) -> list[Expert]: ...

    def __getitem__(self, index: int | slice) -> Expert | list[Expert]:
        assert isinstance(index, int)
        self.ids.append(index)
        return super().__getitem__(index)


class Lent(Sequence[Expert]):
    """Experts of which only the last that was looked up is in memory: that of the others is overwritten."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._last: list[Tensor] = []

    def __len__(self) -> int:
        return COUNT

    @overload
    def __getitem__(self, index: int) -> Expert: ...

    @overload
    def __getitem__(self, index: slice) -> list[Expert]: ...

    def __getitem__(self, index: int | slice) -> Expert | list[Expert]:
        assert isinstance(index, int)
        for memory in self._last:
            memory.view(torch.uint8).fill_(0xff)
        expert = packed(self._kernels)[index]
        self._last = [tensor for part in (expert.gate_up, expert.down) for tensor in getattr(part, "memory", ())]
        return expert


def expert_weights() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gate, up and down of each expert."""
    return [tuple(0.3 * normal(*shape, seed=10 * e + i) for i, shape in enumerate(  # type: ignore[misc]
        ((INNER, SIZE), (INNER, SIZE), (SIZE, INNER)))) for e in range(COUNT)]


def routing(tokens: int) -> Routing:
    """Distinct experts for each token."""
    generator = torch.Generator().manual_seed(3)
    return Routing(ids_Tk=torch.rand(tokens, COUNT, generator=generator).argsort(1)[:, :CHOSEN],
                   weights_Tk=torch.rand(tokens, CHOSEN, generator=generator))


def packed(kernels: KernelSet) -> list[Expert]:
    """The experts in the set's own form."""
    return [Expert(gate_up=kernels.pack([gate, up]), down=kernels.pack([down])) for gate, up, down in expert_weights()]


@pytest.mark.parametrize("make", FLOAT32_SETS)
@pytest.mark.parametrize("activation", [SILU, CLAMPED])
def test_the_sum_is_that_of_the_chosen_experts(make: MakeKernels, activation: Activation) -> None:
    """Against every expert of every token in float64, the shared result included."""
    kernels, x, shared, chosen = make(), normal(50, SIZE), normal(50, SIZE, seed=9), routing(50)
    found = kernels.experts(x, chosen, packed(kernels), activation, shared_TD=shared)
    exact = shared.double()
    for e, weights in enumerate(expert_weights()):
        gate, up, down = (weight.double() for weight in weights)
        g, u = x.double() @ gate.T, x.double() @ up.T
        if activation.limit is not None:
            g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
        out = (g * torch.sigmoid(activation.alpha * g) * (u + activation.shift)) @ down.T
        exact = exact + (chosen.weights_Tk.double() * (chosen.ids_Tk == e)).sum(1, keepdim=True) * out
    assert float((found - exact).abs().max()) < 1e-5


@pytest.mark.parametrize("make", EVERY_SET)
def test_a_token_does_not_see_who_shares_its_experts(make: MakeKernels) -> None:
    """The same bits alone, in any part of the batch, and with the token's experts in another order."""
    kernels = make()
    x, chosen = normal(150, SIZE).to(kernels.dtype), routing(150)
    experts = packed(kernels)
    whole = kernels.experts(x, chosen, experts, SILU, shared_TD=x)
    for part in (slice(0, 1), slice(7, 12), slice(0, 33), slice(90, 150)):
        mine = Routing(ids_Tk=chosen.ids_Tk[part].flip(1), weights_Tk=chosen.weights_Tk[part].flip(1))
        assert torch.equal(kernels.experts(x[part], mine, experts, SILU, shared_TD=x[part]), whole[part])


@pytest.mark.parametrize("make", FLOAT32_SETS)
def test_only_chosen_experts_are_looked_up(make: MakeKernels) -> None:
    """Once each, in ascending order: what no token goes to need not be in memory."""
    kernels = make()
    experts = Looked(packed(kernels))
    ids = torch.tensor([[4, 1], [1, 5]])
    kernels.experts(normal(2, SIZE), Routing(ids_Tk=ids, weights_Tk=torch.ones(2, 2)), experts, SILU)
    assert experts.ids == [1, 4, 5]


@pytest.mark.parametrize("make", EVERY_SET)
def test_experts_one_by_one_give_the_bits_of_all_at_once(make: MakeKernels) -> None:
    """Of a sequence that is no list an expert's memory may be taken back at the next look-up: nothing reads it then."""
    kernels = make()
    x, chosen, experts = normal(60, SIZE).to(kernels.dtype), routing(60), packed(kernels)
    found = kernels.experts(x, chosen, Lent(kernels), SILU)
    assert torch.equal(found, kernels.experts(x, chosen, experts, SILU))


@NEEDS_NATIVE
@pytest.mark.parametrize(("dtype", "path"), NATIVE)
def test_threads_and_groups_change_no_bit(dtype: torch.dtype, path: str) -> None:
    """One thread or three; more assignments than are computed together."""
    x, chosen = normal(6000, SIZE).to(dtype), routing(6000)
    found = [native(dtype, path, threads).experts(x, chosen, packed(native(dtype, path)), CLAMPED)
             for threads in (1, 3)]
    assert torch.equal(*found)
    last = Routing(ids_Tk=chosen.ids_Tk[-5:], weights_Tk=chosen.weights_Tk[-5:])
    assert torch.equal(native(dtype, path).experts(x[-5:], last, packed(native(dtype, path)), CLAMPED), found[0][-5:])


@pytest.mark.parametrize("make", FLOAT32_SETS)
def test_a_value_that_is_no_number_stays_one(make: MakeKernels) -> None:
    """Of the tokens alone that have it; the limits of an activation don't hide it."""
    kernels = make()
    x, chosen = normal(4, SIZE), routing(4)
    x[2, 7] = torch.nan
    found = kernels.experts(x, chosen, packed(kernels), CLAMPED).isnan().any(1)
    assert found.tolist() == [False, False, True, False]


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_values_are_the_first_of_each_entry(kv_dtype: torch.dtype | None) -> None:
    """Attention whose values are part of the keys' entries equals the one over whole entries; unused slots hold NaN."""
    kernels, length = TorchKernels(torch.float32, kv_dtype=kv_dtype), 150
    keys = CacheSpec(name="latent", kind=CacheKind.PAGED, shape=(1, 48), dtype=kernels.kv_dtype)
    table = tables([length], torch.Generator().manual_seed(1))
    batch = view([range(length)], table, GroupKey(CacheKind.PAGED))
    cache = kernels.allocate(keys, 5, PAGE)
    if kv_dtype is None:
        cache[1:] = torch.nan
    kernels.append(cache, normal(length, 1, 48), keys, batch)
    entry, queries = (keys, cache), normal(length, 4, 48, seed=2)
    narrow = kernels.attention(queries, entry, (replace(keys, shape=(1, 32)), cache), batch, 0.2)
    assert torch.equal(narrow, kernels.attention(queries, entry, entry, batch, 0.2)[..., :32])
    assert narrow.isfinite().all()


@pytest.mark.parametrize("make", FLOAT32_SETS)
def test_a_sink_is_one_more_key_without_a_value(make: MakeKernels) -> None:
    """Against dense attention with one more score; a sink of minus infinity changes no bit."""
    kernels, length, sinks = make(), 150, torch.tensor([3.0, -40.0, 0.5, 60.0])
    keys, values = (CacheSpec(name=name, kind=CacheKind.PAGED, shape=(2, 16), dtype=torch.float32)
                    for name in ("k", "v"))
    batch = view([range(length)], tables([length], torch.Generator().manual_seed(1)), GroupKey(CacheKind.PAGED))
    q, k, v = normal(length, 4, 16), normal(length, 2, 16, seed=1), normal(length, 2, 16, seed=2)
    caches = [(spec, kernels.allocate(spec, 5, PAGE)) for spec in (keys, values)]
    for (spec, cache), entries in zip(caches, (k, v), strict=True):
        kernels.append(cache, entries, spec, batch)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(2, 1)) * 0.25
    scores.masked_fill_(torch.ones(length, length).triu(1).bool(), -torch.inf)
    more = torch.cat((scores, sinks.double()[:, None, None].expand(-1, length, 1)), -1).softmax(-1)[..., :-1]
    exact = torch.einsum("hqk,khd->qhd", more, v.double().repeat_interleave(2, 1))
    assert float((kernels.attention(q, *caches, batch, 0.25, sinks_H=sinks) - exact).abs().max()) < 1e-5
    assert torch.equal(kernels.attention(q, *caches, batch, 0.25, sinks_H=torch.full((4,), -torch.inf)),
                       kernels.attention(q, *caches, batch, 0.25))


@NEEDS_NATIVE
def test_the_native_set_refuses_what_it_does_not_compute() -> None:
    """Other activations outside of experts, and values inside key entries, each by name."""
    kernels = native(torch.float32, HIGHEST[torch.float32])
    with pytest.raises(ValueError, match="Activation"):
        kernels.swiglu(normal(2, 32), CLAMPED)
    spec = CacheSpec(name="k", kind=CacheKind.PAGED, shape=(1, 16), dtype=torch.float32)
    entry = spec, kernels.allocate(spec, 2, PAGE)
    batch = view([range(1)], torch.ones(1, 1, dtype=torch.int64), spec.group)
    with pytest.raises(ValueError, match="keys and values apart"):
        kernels.attention(normal(1, 1, 16), entry, entry, batch, 1.0)
