"""Model names and configurations.  Layer 0: knows neither torch nor Beam, and no tensor."""

from batchgen_beam.config import families
from batchgen_beam.config.base import DecoderConfig, ModelConfig
from batchgen_beam.config.model_registry import (
    get_registered_models,
    load_config,
    register_config,
    require_supported,
)
from batchgen_beam.config.rope import RopeParameters

__all__ = [
    "DecoderConfig",
    "ModelConfig",
    "RopeParameters",
    "families",
    "get_registered_models",
    "load_config",
    "register_config",
    "require_supported",
]
