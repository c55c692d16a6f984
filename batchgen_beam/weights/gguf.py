"""GGUF files of architecture `llama`, made into a folder that loads like any other checkpoint."""

from batchgen_beam.weights.gguf_metadata import GgufMetadata, read_metadata

__all__ = ["GgufMetadata", "read_metadata"]
