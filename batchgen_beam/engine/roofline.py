"""Seconds of tasks from a device's rates: whatever takes longer, the operations or the bytes (Williams et al., 2009).

A bound, not a forecast: no kernel reaches both rates.  Several devices share a pass: each attends to its own rows with
its own copy of the attention's weights, experts and other weights are spread.  Does not know plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_beam.engine.device_profile import DeviceProfile
from batchgen_beam.engine.model_load import LayerLoad, ModelLoad

__all__ = ["Roofline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The costs of a model on `devices` equal devices."""

    profile: DeviceProfile
    model: ModelLoad
    devices: int = 1

    @property
    def disk(self) -> float:
        """Bytes/s that the host reads."""
        return self.profile.disk

    @property
    def to_device(self) -> float | None:
        """Bytes/s of all host links together."""
        return self.profile.to_device * self.devices

    @property
    def to_host(self) -> float | None:
        """The same in the other direction."""
        return self.profile.to_host * self.devices

    def attention(self, layer: LayerLoad, tokens: int, context: float, *, prompt: bool) -> float:
        """A sub-batch: its weights once, and for answers the keys and values of each row."""
        seen = layer.seen(context)
        past = 0.0 if prompt else seen * layer.kv_token_bytes + layer.state_bytes
        flops = tokens * (layer.attention_flops + seen * layer.context_flops)
        return max(flops / self._flops, layer.attention_bytes / self.profile.memory_bandwidth +
                   tokens * past / self._bandwidth)

    def feed_forward(self, layer: LayerLoad, tokens: int) -> float:
        """All tokens of a pass: the weights that they touch, once."""
        flops = tokens * (layer.fixed_flops + layer.experts_per_token * layer.expert_flops)
        weights = layer.fixed_bytes + layer.touched(tokens) * layer.expert_bytes
        return max(flops / self._flops, weights / self._bandwidth)

    def combine(self, tokens: int) -> float:
        """Each token's state to the devices that have its experts, and back."""
        if self.devices == 1:
            return 0.0
        spread = tokens * self.model.state_width * (self.devices - 1) / self.devices
        return 2 * spread / (self.profile.between_devices * self.devices)

    def head(self, tokens: int) -> float:
        """Logits of so many tokens."""
        return max(tokens * self.model.head_flops / self._flops, self.model.head_bytes / self._bandwidth)

    @property
    def _flops(self) -> float:
        return self.profile.flops * self.devices

    @property
    def _bandwidth(self) -> float:
        return self.profile.memory_bandwidth * self.devices
