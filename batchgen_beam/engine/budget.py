"""How many pages the KV budget buys.  Pure arithmetic over what the layers declare; allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen_beam.engine.paging import pages_of, useful_pages
from batchgen_beam.errors import OptionError
from batchgen_beam.models.caches import CacheKind, GroupKey
from batchgen_beam.models.interface import CacheSpec, Model
from batchgen_beam.settings import PAGE_TOKENS, EngineSettings

__all__ = ["PageBudget", "page_budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBudget:
    """Pages of each group on both tiers, the zero page included.

    `context_limit` (tokens) is what the model and the settings allow, `longest_row` what the device tier holds of it.
    `token_bytes` is what the KV of one more token takes, while no window has dropped any.
    """

    device: dict[GroupKey, int]
    host: dict[GroupKey, int]
    context_limit: int
    longest_row: int
    token_bytes: int


def page_budget(model: Model, settings: EngineSettings) -> PageBudget:
    """State slots for `max_rows` first; of the rest all paged groups get as many pages: a row enters with as many.

    No group gets more than `max_rows` rows of the context limit can use: behind windows that is soon reached, and the
    others get the rest.  `OptionError` if not even one page of each group fits.
    """
    page_bytes = _page_bytes([layer.cache_spec() for layer in model.layers])
    context = min(model.context_limit, settings.max_context or model.context_limit)
    slot_bytes = sum(size for group, size in page_bytes.items() if group.kind is CacheKind.STATE)
    least = settings.max_rows * slot_bytes + sum(
        size for group, size in page_bytes.items() if group.kind is not CacheKind.STATE)
    if least > settings.kv_memory:
        raise OptionError(
            f"{settings.max_rows} state slots of {slot_bytes} bytes and one KV page of each cache group need {least} "
            f"bytes, --kv-memory is {settings.kv_memory}; raise --kv-memory or lower --max-rows")
    paged = {group: size for group, size in page_bytes.items() if group.kind is not CacheKind.STATE}
    most = {group: useful_pages(group.window, settings.max_rows, context) for group in paged}

    def tier(memory: int) -> dict[GroupKey, int]:
        states = settings.max_rows if memory else 0
        pages = _shared(memory - states * slot_bytes, paged, most)
        return {group: 1 + pages.get(group, states) for group in page_bytes}

    device = tier(settings.kv_memory)
    held = min((device[group] - 1 for group in paged), default=pages_of(context))
    return PageBudget(device=device, host=tier(settings.kv_host_memory), context_limit=context,
                      longest_row=min(context, held * PAGE_TOKENS),
                      token_bytes=sum(paged.values()) // PAGE_TOKENS)


def _shared(memory: int, sizes: Mapping[GroupKey, int], most: Mapping[GroupKey, int]) -> dict[GroupKey, int]:
    """As many pages of each group; what one of them can't use goes to the others."""
    pages: dict[GroupKey, int] = {}
    for group in sorted(sizes, key=lambda one: most[one]):
        together = sum(size for other, size in sizes.items() if other not in pages)
        pages[group] = max(0, min(most[group], memory // together))
        memory -= pages[group] * sizes[group]
    return pages


def _page_bytes(specs: Sequence[Sequence[CacheSpec]]) -> dict[GroupKey, int]:
    sizes: dict[GroupKey, int] = {}
    for spec in (spec for layer in specs for spec in layer):
        items = 1 if spec.kind is CacheKind.STATE else PAGE_TOKENS
        sizes[spec.group] = sizes.get(spec.group, 0) + items * spec.item_bytes
    return sizes
