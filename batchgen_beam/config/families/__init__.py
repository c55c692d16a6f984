"""One file per group of model families; importing this package registers all of them."""

from batchgen_beam.config.families import fake, llama

__all__ = ["fake", "llama"]
