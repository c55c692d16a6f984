"""Where weights, keys and values lie under a plan, and whether that fits.

Owns the arithmetic of memory: pure, in bytes.  Does not know time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from batchgen_beam.engine.model_load import LayerLoad, ModelLoad
from batchgen_beam.settings import PREFILL_CHUNK

__all__ = ["Budgets", "Choice", "LayerStream", "Placement", "Shortage", "Tier", "Workload", "pass_bytes", "place",
           "streamable"]

_LOGIT = 4


class Tier(StrEnum):
    """Where the part of a layer's weights that may be streamed lies."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes.  `device` is of all devices together, `weights` bounds what of it weights and their buffers take.

    `unified`: device and host are one memory, so nothing is kept on the host beside it.
    """

    device: int
    host: int = 0
    weights: int | None = None
    devices: int = 1
    unified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be answered: rows, and the mean tokens of their prompts and answers."""

    rows: int
    prompt_tokens: int
    output_tokens: int

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens of a row in one pass, where --prefill-chunk is not given."""
        return min(self.prompt_tokens, PREFILL_CHUNK)

    @property
    def row_tokens(self) -> int:
        """Context of a row at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Choice:
    """What a plan decides: rows of an attention sub-batch, tokens of a pass, pieces of a streamed layer, their buffers.

    `kv_on_host`: keys and values of all rows lie there, and come for each sub-batch; `on_demand`: only experts that
    were chosen are fetched, after the router; `whole`: attention's weights are streamed with their layer, which only a
    single device does: of several each keeps its own copy.
    """

    b_attn: int
    b_moe: int
    chunks: int = 1
    buffers: int = 2
    kv_on_host: bool = False
    on_demand: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStream:
    """What of a layer is read from the disk in each pass: bytes of its attention, of what else every token needs, and
    so many experts of `expert` bytes each."""

    attention: int = 0
    always: int = 0
    experts: int = 0
    expert: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Bytes on each tier, where each layer's streamed part is, and the number of buffers for weights.

    `limit`: of the memory of weights, where a residency was chosen for it.
    """

    places: tuple[Tier | LayerStream, ...]
    ring: int
    limit: int | None = None
    fixed: int
    resident: int
    buffers: int
    kv_device: int
    workspace: int
    host_weights: int
    host_buffers: int
    kv_host: int
    disk_weights: int

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tier of each layer; one that reads some of its weights is on the disk."""
        return tuple(where if isinstance(where, Tier) else Tier.DEVICE if where == LayerStream() else Tier.DISK
                     for where in self.places)

    @property
    def device(self) -> int:
        """All that the devices hold."""
        return self.fixed + self.resident + self.buffers + self.kv_device + self.workspace

    @property
    def host(self) -> int:
        """All that the host holds."""
        return self.host_weights + self.host_buffers + self.kv_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Budgets that do not hold what a choice needs at least: `device`, `weight` or `host`, bytes needed and given."""

    budgets: tuple[tuple[str, int, int], ...]

    @property
    def missing(self) -> int:
        """Bytes that are missing, all together."""
        return sum(needed - given for _, needed, given in self.budgets)


def streamable(layer: LayerLoad, whole: bool) -> int:
    """Bytes of a layer that may be fetched during a pass: experts, or all of a dense feed-forward part."""
    rest = layer.experts * layer.expert_bytes if layer.experts else layer.fixed_bytes
    return rest + (layer.attention_bytes + (layer.fixed_bytes if layer.experts else 0)) * whole


def place(model: ModelLoad, budgets: Budgets, work: Workload, choice: Choice) -> Placement | Shortage:
    """What lies where.  Weights that may be streamed fill the devices, spread evenly over the layers, then the host."""
    rows = min(choice.b_moe, work.rows)
    streamed = [streamable(layer, choice.whole) for layer in model.layers]
    fixed = model.embedding_bytes + model.head_bytes + sum(
        _fixed(layer, choice.whole, budgets.devices) for layer in model.layers)
    kv_device = kv_rows = model.kv_bytes(rows, work.row_tokens)
    if choice.kv_on_host:
        kv_device = 2 * max(layer.kv_bytes(min(choice.b_attn, rows), work.row_tokens, model.context)
                            for layer in model.layers)
    workspace = pass_bytes(model, work, choice)
    room = budgets.device - fixed - kv_device - workspace
    if budgets.weights is not None:
        room = min(room, budgets.weights - fixed)
    buffers = 0
    if sum(streamed) > room:
        buffers = choice.buffers * max(-(-size // choice.chunks) for size in streamed)
    resident = _spread(streamed, room - buffers)
    waiting = [0 if one else size for one, size in zip(resident, streamed, strict=True)]
    kv_host = kv_rows if choice.kv_on_host else 0
    left = 0 if budgets.unified else budgets.host - kv_host
    staging = 0 if budgets.unified or sum(waiting) <= left else buffers
    shortage = _shortage(budgets, fixed + buffers, kv_device + workspace, kv_host + staging)
    if shortage is not None:
        return shortage
    on_host = _spread(waiting, left - staging)
    tiers = tuple(Tier.DEVICE if one else Tier.HOST if two else Tier.DISK
                  for one, two in zip(resident, on_host, strict=True))
    sums = {tier: sum(size for size, own in zip(streamed, tiers, strict=True) if own is tier) for tier in Tier}
    return Placement(places=tiers, ring=choice.buffers, fixed=fixed, resident=sums[Tier.DEVICE], buffers=buffers,
                     kv_device=kv_device, workspace=workspace, host_weights=sums[Tier.HOST], host_buffers=staging,
                     kv_host=kv_host, disk_weights=sums[Tier.DISK])


def _shortage(budgets: Budgets, weights: int, rest: int, host: int) -> Shortage | None:
    """Which budgets do not hold the weights and the rest on the devices, and what is on the host."""
    needs = (("device", weights + rest, budgets.device), ("host", host, budgets.host),
             ("weight", weights, weights if budgets.weights is None else budgets.weights))
    short = tuple((what, needed, given) for what, needed, given in needs if needed > given)
    return Shortage(budgets=short) if short else None


def _fixed(layer: LayerLoad, whole: bool, devices: int) -> int:
    """What of a layer always stays on the devices: attention's weights on each of them."""
    if whole:
        return 0
    return layer.attention_bytes * devices + (layer.fixed_bytes if layer.experts else 0)


def pass_bytes(model: ModelLoad, work: Workload, choice: Choice) -> int:
    """Layer states of a pass (before and after a half), the widest half, and logits of the rows."""
    attention = max(layer.attention_width for layer in model.layers) * min(choice.b_attn * work.chunk_tokens,
                                                                          choice.b_moe)
    rest = max(layer.feed_forward_width for layer in model.layers) * choice.b_moe
    logits = _LOGIT * model.vocabulary * min(choice.b_moe, work.rows)
    return 2 * model.state_width * choice.b_moe + max(attention, rest) + logits


def _spread(sizes: list[int], room: int) -> list[bool]:
    """Which layers fit into `room`, evenly over their order: first every layer's turn in bit-reversed order."""
    bits = max(1, (len(sizes) - 1).bit_length())
    turns = sorted(range(len(sizes)), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    taken = [False] * len(sizes)
    for index in turns:
        if 0 < sizes[index] <= room:
            taken[index] = True
            room -= sizes[index]
    return taken
