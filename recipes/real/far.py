"""Which tokens need what lies further back than a cache holds: those whose loss is lowest with the whole text beside the last tokens alone.

    python3 recipes/real/far.py whole.jsonl windows.jsonl > classes.jsonl

Both files are of `kvtune evaluate --losses`, of one model with a cache that keeps everything: over whole samples, and over windows of them, which
overlap and predict each token once. Writes lines for `--token-classes`: the decile of all tokens that gains most is `far`. Needs Python alone.
"""

import json
import sys


def read(path):
    """Losses by sample; those of its windows stand one after the other."""
    losses = {}
    for line in open(path, encoding="utf-8"):
        row = json.loads(line)
        losses.setdefault(row["sample"], []).extend(row["losses"])
    return losses


def main():
    whole, windows = (read(path) for path in sys.argv[1:3])
    gains = []
    for sample, losses in whole.items():
        near = windows[sample]
        if len(near) != len(losses):
            sys.exit(f"far.py: error: sample {sample} has {len(losses)} losses whole and {len(near)} in windows")
        gains += [(short - long, sample, rank) for rank, (short, long) in enumerate(zip(near, losses))]
    gains.sort(reverse=True)
    far = {sample: [] for sample in whole}
    for _, sample, rank in gains[: len(gains) // 10]:
        far[sample].append(rank)
    for sample, ranks in far.items():
        print(json.dumps({"sample": sample, "classes": {"far": sorted(ranks)}}))


main()
