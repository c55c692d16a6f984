"""Model names and configurations.  Layer 0: knows neither torch nor Beam, and no tensor.

Importing it registers the configuration classes of all families.
"""

from batchgen_beam.config import families

__all__ = ["families"]
