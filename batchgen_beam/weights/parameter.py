"""One parameter of a model, and what fills it: a stored tensor, or one expert's part of a tensor of all experts.

Does not know tables, files or dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Cut", "Parameter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Of a stored tensor's part `[expert]` the `outputs`, which are its first dimension, or its last if `inputs_first`;
    a matrix then becomes `[outputs, inputs]`."""

    expert: int
    outputs: slice
    inputs_first: bool = False

    def take(self, part: Tensor) -> Tensor:
        """The parameter out of this expert's part, a matrix or a bias."""
        if part.ndim == 1 or not self.inputs_first:
            return part[self.outputs]
        return part[:, self.outputs].T


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter, the stored tensor that fills it, and its shape, which is also that of the tensor unless `cut` says
    otherwise (then that is `stored_shape`).  An `exact` one is float32 whatever the run's dtype."""

    name: str
    stored: str
    shape: tuple[int, ...]
    exact: bool = False
    cut: Cut | None = None
    stored_shape: tuple[int, ...] | None = None
