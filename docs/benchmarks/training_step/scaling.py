"""What a step of ours costs by packed tokens, by the length of one document and by depths.

python scaling.py OUT_FOLDER [--steps 8]     (make bench-scaling)

Writes scaling.json, scaling_tokens.svg and scaling_depths.svg. Each point is a process of its own (worker.py) and the best of its steps:
what disturbs them only adds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from contender import Contender
from run import about, states

from eval.widgets import SERIES, Line, chart
from train.dist import usual_dtype

LENGTHS, DEPTHS, U = (512, 1024, 2048, 4096, 8192), (1, 2, 3, 5, 7), 8192
# By name: sequences, length and depths of each point.
CURVES = {
    "documents of 512, 3 depths": [(tokens // 512, 512, 3) for tokens in LENGTHS],
    "one document, 3 depths": [(1, tokens, 3) for tokens in LENGTHS],
    "1 x 1,024, by depths": [(1, 1024, depths) for depths in DEPTHS],
}


def best(sequences: int, length: int, depths: int, dtype: str, data: Path, steps: int) -> dict[str, Any]:
    settings = {"sequences": sequences, "length": length, "depths": depths, "draft_vocab": U, "dtype": dtype, "supervised": 1.0}
    one = Contender(HERE / "worker.py", "draftsmith", {**settings, "data": str(data), "warm": 2}, {})
    seconds = min(one.ask("step")["wall"] for _ in range(steps))
    peak = one.ask("peak")
    one.close()
    point = {"sequences": sequences, "length": length, "depths": depths, "tokens": sequences * length}
    return {**point, "seconds": seconds, "gb": peak["peak_gb"] - peak["idle_gb"]}


def picture(lines: list[Line], x_label: str) -> str:
    """A chart of the report as a file of its own."""
    svg = "<svg" + chart(lines, x_label).partition("<svg")[2]
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background:#fff" font-family="sans-serif" ', 1) + "\n"


def pictures(curves: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """By file name. The dashed line goes from nothing through the first point: what is linear lies on it or below."""
    by_length = dict(list(curves.items())[:2])
    (first, *_, last), (by_depths,) = by_length["documents of 512, 3 depths"], list(curves.values())[2:]
    straight = [(0.0, 0.0), (float(last["tokens"]), first["seconds"] * last["tokens"] / first["tokens"])]
    lines = [Line(name, [(p["tokens"], p["seconds"]) for p in points], SERIES[i]) for i, (name, points) in enumerate(by_length.items())]
    depths = [Line("by depths", [(p["depths"], p["seconds"]) for p in by_depths], SERIES[2])]
    through = [(0.0, 0.0), (float(by_depths[-1]["depths"]), by_depths[0]["seconds"] * by_depths[-1]["depths"])]
    return {
        "scaling_tokens.svg": picture([*lines, Line("", straight, "#8a94a3", "dashed")], "tokens in a step"),
        "scaling_depths.svg": picture([*depths, Line("", through, "#8a94a3", "dashed")], "depths"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    dtype, data = usual_dtype(), states()
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, points in CURVES.items():
        curves[name] = []
        for point in points:
            curves[name].append(best(*point, dtype, data, args.steps))
            print(name, json.dumps(curves[name][-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scaling.json").write_text(json.dumps({"machine": about(dtype), "curves": curves}, indent=2) + "\n")
    for name, svg in pictures(curves).items():
        (args.out / name).write_text(svg)


if __name__ == "__main__":
    main()
