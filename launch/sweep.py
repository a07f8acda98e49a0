"""python launch/sweep.py conf=<name>[,<name>...] [key=v1,v2 ...] [untrained=true] [out=<path>]

Every combination of the values, each a run of its own (launch/run.py) under runs/sweep/, then one table: <out>.md and <out>.json.
untrained=true: also what each head accepts untrained."""

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from eval import sweep
from train.config import guard
from train.usage import usage
from train.words import take


def main() -> None:
    words = sys.argv[1:]
    if not words or {"-h", "--help"} & set(words):
        return print(usage(__doc__ or "", ()))
    own = take("untrained", "out")
    runs = sweep.plan(sys.argv[1:], own.get("untrained", "false") == "true")
    failed = sweep.run_all(ROOT, runs)
    rows = sweep.table(ROOT / "runs", [name for name, _ in runs], failed)
    command = f"python launch/sweep.py {shlex.join(words)}"
    print("\n" + sweep.write(ROOT / own.get("out", "runs/sweep/table"), rows, command))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    guard(main)
