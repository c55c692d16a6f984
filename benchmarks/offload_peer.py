"""transformers with accelerate's disk offload, in its own environment: needs nothing of this project.

    python offload_peer.py --model FOLDER --offload FOLDER --weight-memory BYTES --rows N --prompt N --output N
        --dtype NAME

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import accelerate
import torch
import transformers
from transformers import AutoModelForCausalLM


def disk_bytes() -> int:
    """Bytes that this process made the disk read."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
    return int(line.split()[1])


def main() -> None:
    """Load, answer, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "offload", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("weight-memory", "rows", "prompt", "output", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.dtype), device_map="auto", max_memory={"cpu": given.weight_memory},
        offload_folder=given.offload).eval()
    loaded = time.perf_counter()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = torch.randint(3, model.config.vocab_size, (given.rows, given.prompt),
                        generator=torch.Generator().manual_seed(5))
    read = disk_bytes()
    with torch.inference_mode():
        answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=given.output,
                                do_sample=False)
    seconds = time.perf_counter() - loaded
    if answer.shape != (given.rows, given.prompt + given.output):
        raise SystemExit(f"answers of another shape: {tuple(answer.shape)}")
    places = list(getattr(model, "hf_device_map", {}).values())
    print(json.dumps({
        "load_seconds": loaded - started, "seconds": seconds, "disk_bytes": disk_bytes() - read,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "placed": {str(place): places.count(place) for place in set(places)}, "accelerate": accelerate.__version__,
        "transformers": transformers.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
