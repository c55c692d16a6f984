"""A race of batchgen-beam and its peers on the same prompts with exact output lengths.

    python -m benchmarks.race setup [--peers NAME,...] [--home .cache/race]
    python -m benchmarks.race run --workload W1 [--engines ours,openvino,...] --out DIR
    python -m benchmarks.race report DIR...
    python -m benchmarks.race workload W1 --out W1.jsonl

One process runs at a time, in its own pinned environment; `run` repeats each engine, alternates the order, and repeats
what other processes disturbed.  Linux only: CPU time and memory of process trees come from /proc.
"""
