"""An engine under `--weight-memory`: the same answers, the copy in the model cache, refusals by the flag's name."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchgen_beam.engine.driver import Driver
from batchgen_beam.errors import CheckpointError, EngineError, OptionError
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.records import Answer
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.engine_loader import load_engine
