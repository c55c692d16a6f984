"""Names of lanes, chosen so that runners which place keys by hash spread them evenly.

Owns the table.  Flink's batch mode sends an encoded key to worker `murmur(Arrays.hashCode(bytes)) % workers`
(`EncodedValueComparator.hash` of Beam's Flink runner, `OutputEmitter.hashPartitionDefault` of Flink), and few keys of
any natural spelling fall unevenly.  Each suffix below is the least number for which lane i falls on i % 24 of 24
workers, with the key's bytes bare and with their length in front: so any run of lanes from lane 0 is shared evenly by
2, 3, 4, 6, 8, 12 or 24 workers.  Knows no runner and no row.
"""

from __future__ import annotations

__all__ = ["MAX_LANES", "lane_index", "lane_name"]

_SUFFIXES = (
    671, 608, 310, 2300, 1187, 665, 127, 403, 376, 90, 258, 127, 143, 940, 72, 49, 147, 170, 320, 295, 2146, 74,
    91, 4, 223, 240, 641, 556, 1359, 1170, 276, 273, 1801, 391, 713, 902, 333, 533, 636, 496, 281, 542, 978,
    580, 774, 989, 7, 1440, 59, 154, 344, 93, 1073, 141, 529, 533, 1087, 1099, 50, 214, 362, 563, 1317, 160, 50,
    126, 825, 566, 719, 431, 770, 2225, 425, 209, 248, 468, 70, 141, 418, 153, 227, 574, 5, 2, 860, 722, 259,
    403, 219, 593, 371, 31, 169, 584, 1204, 606, 11, 262, 57, 251, 61, 273, 757, 1974, 1143, 650, 106, 127, 31,
    195, 854, 676, 790, 396, 64, 286, 308, 103, 96, 528, 973, 1203, 1671, 14, 238, 158, 418, 177, 224, 1507,
    197, 4, 735, 65, 350, 11, 151, 609, 1527, 20, 44, 770, 199, 846, 94, 458, 302, 284, 1843, 114, 109, 179,
    2755, 40, 951, 6, 1041, 664, 728, 300, 663, 552, 854, 45, 967, 371, 429, 540, 528, 250, 106, 199, 66, 149,
    333, 586, 1006, 539, 485, 1259, 3, 234, 178, 930, 284, 97, 2710, 788, 910, 1324, 358, 2672, 891, 633, 664,
    530, 794, 321, 450, 1027, 1725, 86, 181, 926, 248, 123, 139, 277, 413, 161, 165, 1214, 480, 1898, 1561, 178,
    414, 1594, 1212, 364, 1103, 735, 1790, 177, 756, 424, 51, 820, 568, 181, 1709, 999, 436, 808, 6, 60, 910,
    231, 290, 1134, 290, 308, 145, 954, 451, 44, 376, 1758, 297, 450, 89, 120, 541, 459, 462, 158,
)

MAX_LANES = len(_SUFFIXES)


def lane_name(index: int) -> str:
    """The key of lane `index`, 0 <= index < MAX_LANES."""
    return f"lane-{index:03d}-{_SUFFIXES[index]:04d}"


def lane_index(name: str) -> int:
    """The inverse of `lane_name`."""
    return int(name.split("-")[1])
