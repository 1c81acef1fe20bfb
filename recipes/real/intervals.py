"""What training in the loop gains over training with the full cache, from the answers that `run.sh` keeps: for each cache the shares of right
answers, and their difference over the same seeds and questions with the interval that holds 95 % of 10 000 draws with replacement.

    python3 recipes/real/intervals.py data/real/lines

Of one file of answers it prints how many are right. Needs Python alone.
"""

import json
import pathlib
import random
import re
import sys

LINE = re.compile(r"(?P<seed>[^-]+)-(?P<trained>base|full|[^-]+:\d+)-(?P<policy>.+)-(?P<slots>\d+)\.jsonl")


def right(path):
    """By sample, whether the number that was asked for is in the answer, whatever stands around it but a further digit."""
    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    return {row["sample"]: float(row["references"][0].strip() in re.findall(r"\d+", row["prediction"])) for row in rows}


def main():
    place, answers = pathlib.Path(sys.argv[1]), {}
    if place.is_file():
        return print(int(sum(right(place).values())))
    for path in sorted(place.glob("*.jsonl")):
        seed, trained, policy, slots = LINE.fullmatch(path.name).groups()
        # Only what has come to its end.
        if path.with_suffix("").exists():
            cache = f"{policy}:{slots}"
            kind = trained if trained in ("base", "full") else "loop"
            answers.setdefault(cache, {}).setdefault(kind, {}).update({(seed, at): score for at, score in right(path).items()})
    draw = random.Random(0)
    print("cache", "base", "trained with the full cache", "in the loop", "in the loop less full", "95 % interval", "answers", sep="\t")
    for cache, arms in answers.items():
        share = {kind: f"{sum(arm.values()) / len(arm):.3f}" for kind, arm in arms.items()}
        cells = [cache, *(share.get(kind, "") for kind in ("base", "full", "loop"))]
        both = sorted(set(arms.get("loop", {})) & set(arms.get("full", {})))
        if both:
            gains = [arms["loop"][key] - arms["full"][key] for key in both]
            means = sorted(sum(draw.choices(gains, k=len(gains))) / len(gains) for _ in range(10_000))
            cells += [f"{sum(gains) / len(gains):+.3f}", f"{means[250]:+.3f} to {means[9749]:+.3f}", str(len(both))]
        print(*cells, sep="\t")


main()
