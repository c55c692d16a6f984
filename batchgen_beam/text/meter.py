"""How much work one rendering of a template may do.

Owns the budgets and what a value costs.  Does not know Jinja's syntax, messages or models.

Counts, not seconds: the same row has the same outcome on every machine.  Whatever is made is charged with its deep
size, so that all values of a rendering together stay within the budget, and so does every later walk over them.
"""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView

import jinja2

__all__ = ["MAX_STEPS", "Meter"]

MAX_STEPS = 1_000_000
"""Steps of one rendering: some seconds on a slow core at worst, and thousands of turns for a usual template."""

_TEXTS = (str, bytes, bytearray)
_CONTAINERS = (list, tuple, set, frozenset, range, KeysView, ValuesView, ItemsView)
_MAX_BITS = 4096


class Meter:
    """What one rendering may still do."""

    def __init__(self, characters: int) -> None:
        """A fresh budget of `MAX_STEPS` steps and so many characters."""
        self._limit = characters
        self._characters = characters
        self._steps = MAX_STEPS

    def charge(self, characters: int = 0) -> None:
        """Pay one step and some characters.

        Raises:
            jinja2.TemplateRuntimeError: the budget is used up.
        """
        self._steps -= 1
        self._characters -= characters
        if self._steps < 0:
            raise jinja2.TemplateRuntimeError(f"the template takes more than {MAX_STEPS} steps")
        if self._characters < 0:
            raise jinja2.TemplateRuntimeError(f"the template handles more than {self._limit} characters")

    def charge_value(self, value: object, times: int = 1) -> None:
        """Pay for a value, so many times: a step for each item in it at any depth, and the lengths of its texts.

        Raises:
            jinja2.TemplateRuntimeError: the budget is used up, or a number in it is too large to compute with.
        """
        if isinstance(value, _TEXTS):
            self.charge(len(value) * max(1, times))
            return
        for _ in range(max(1, times)):
            self._charge_items(value)

    def _charge_items(self, value: object) -> None:
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.charge(len(item) if isinstance(item, _TEXTS) else 0)
            if isinstance(item, int) and item.bit_length() > _MAX_BITS:
                raise jinja2.TemplateRuntimeError(f"numbers over {_MAX_BITS} bits are refused")
            if isinstance(item, dict):
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, _CONTAINERS):
                waiting += item
