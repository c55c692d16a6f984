"""How each kernel set keeps packed products as plain tensors.

The native set's panels are memory that its kernels read in place.  What torch prepacks can't be kept: there the plain
weights are, and each use packs them anew, with the same bits.  Does not know files or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen_beam.kernels.gemm import PackedLinear
from batchgen_beam.kernels.native_set import KERNELS_VERSION, NativeKernels, PackedParts
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.weights.packing import Packing, Product, StoredForm

__all__ = ["NativePacking", "PlainPacking", "packing_of"]


def packing_of(kernels: KernelSet) -> Packing:
    """The way of this kernel set."""
    match kernels:
        case NativeKernels():
            return NativePacking(kernels)
        case TorchKernels():
            return PlainPacking(kernels)
    raise AssertionError(f"no packing is written for the {kernels.name} kernel set")


class NativePacking:
    """For each part its panels, then its bias if there are biases."""

    copies = False

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self.name = f"native {kernels.path} v{KERNELS_VERSION}"

    def forms(self, product: Product) -> tuple[StoredForm, ...]:
        """Panels as bytes; biases in float32."""
        forms: list[StoredForm] = []
        for outputs in product.outputs:
            forms.append(StoredForm(dtype=torch.uint8, shape=(self._kernels.panel_bytes(outputs, product.inputs),)))
            if product.biases:
                forms.append(StoredForm(dtype=torch.float32, shape=(outputs,)))
        return tuple(forms)

    def store(self, product: Product, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Packed as for use."""
        del product
        return self._kernels.pack(weights, biases=biases or None).memory

    def adopt(self, product: Product, tensors: Sequence[Tensor]) -> PackedParts:
        """Over the tensors' own memory."""
        return self._kernels.adopt(tensors, product.outputs, product.inputs, biased=bool(product.biases))

    def exact_bytes(self, outputs: int, inputs: int) -> int:
        """In the run's dtype."""
        return self._kernels.panel_bytes(outputs, inputs)


class PlainPacking:
    """The stacked weight, then the stacked bias if there is one, in the run's dtype."""

    copies = True

    def __init__(self, kernels: TorchKernels) -> None:
        self._kernels = kernels
        self.name = "plain v1"

    def forms(self, product: Product) -> tuple[StoredForm, ...]:
        """`[N, K]` and `[N]`."""
        outputs = sum(product.outputs)
        weight = StoredForm(dtype=self._kernels.dtype, shape=(outputs, product.inputs))
        return (weight, StoredForm(dtype=self._kernels.dtype, shape=(outputs,))) if product.biases else (weight,)

    def store(self, product: Product, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Stacked."""
        del product
        return (torch.cat(list(weights)), torch.cat(list(biases))) if biases else (torch.cat(list(weights)),)

    def adopt(self, product: Product, tensors: Sequence[Tensor]) -> PackedLinear:
        """Packed anew, on the kernel set's device; nothing of it keeps the tensors' memory in use."""
        del product
        packed = self._kernels.pack(tensors[:1], biases=[bias.clone() for bias in tensors[1:]] or None)
        return packed.apart_from(tensors[0])

    def exact_bytes(self, outputs: int, inputs: int) -> int:
        """Float32."""
        return outputs * inputs * torch.float32.itemsize
