"""A store of bounded size: capture writes states in the order in which training reads them, and deletes those that it is past.

The order follows from answers, seed and budget alone (data.batch), so both sides know it. What is stored is a read: one sequence for one
micro-batch of the endless row of epochs, under the id `<micro-batch>/<sequence>`. The training says in `reader/progress.json` before
which micro-batch it will never read again (that of its latest checkpoint, from which it would go on after a kill) and where it ends;
capture alone writes shards and manifest. Each side holds a lock while it lives, by which the other knows whom it waits for.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.commands import command
from data.errors import UserError
from data.files import read_object
from data.lock import held, hold
from data.manifest import check_compatible, differences, replace_text
from data.online import Answers
from data.store import Store, StoreWriter

SHARDS = 32  # at least so many in a window


@dataclass(frozen=True)
class Sizes:
    """Of a window. Beside whole shards there are a shard that is not full, the sequences in the engine, and those before the writer, for
    which room is kept, each of at most `shard` tokens and a sequence; the training may need what lies among as much again, and a shard
    that it is past in part.
    """

    window: float  # bytes
    token: int  # bytes of a token, at most
    shard: int  # tokens of a shard
    in_flight: int  # sequences in the engine

    @property
    def room(self) -> float:
        """Bytes that are kept free for what is in the engine and not yet in a shard."""
        return 4 * self.shard * self.token

    @property
    def usable(self) -> float:
        """Bytes of states that may lie between two checkpoints: were it more, each side would wait for the other."""
        return self.window - 8 * self.shard * self.token

    @staticmethod
    def of(window_gb: float, token_bytes: int, longest: int) -> Sizes:
        """longest: tokens of a sequence."""
        shard = max(longest, min(65536, int(window_gb * 1e9 / token_bytes) // SHARDS))
        return Sizes(window_gb * 1e9, token_bytes, shard, min(32, shard // longest))


def read_id(micro: int, name: str) -> str:
    return f"{micro}/{name}"


def order_of(answers: Answers, seed: int, micro_tokens: int, max_length: int) -> dict[str, Any]:
    """What the order of reads follows from, for the manifest: another one is another window."""
    digest = hashlib.sha256()
    for i, name in enumerate(answers.ids):
        ids_T, mask_T = answers.tokens(i)
        digest.update(f"{name} {len(ids_T)} ".encode() + ids_T.numpy().tobytes() + mask_T.numpy().tobytes())
    return {"seed": seed, "micro_tokens": micro_tokens, "max_length": max_length, "answers": digest.hexdigest()}


def read_progress(folder: Path) -> tuple[int, int] | None:
    """(first micro-batch that may be read again, end of the training); None before a training began."""
    path = folder / "reader" / "progress.json"
    if not path.is_file():
        return None
    found = read_object(path, f"delete it and start `{command('train')}`")
    return found["next"], found["end"]


class Waiting:
    """Says whom one side waits for, once, and again when that one comes or goes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.said = say, ""

    def on(self, what: str, partner: Path, stage: str) -> None:
        """stage: capture or train."""
        name = {"train": "training"}.get(stage, stage)
        there = held(partner)
        if f"{name} {there}" != self.said:
            self.said = f"{name} {there}"
            state = "it is running" if there else f"none is running, start it with `{command(stage)}`"
            self.say(f"waiting for the {name}: {what}; {state}")

    def over(self) -> None:
        self.said = ""


class Window(Answers):
    """The reader's side. folder: of the store. wanted: what its manifest must say (target, tokenizer_hash, template_hash, window);
    taps, last: what the head reads. say: prints a line on rank 0. leader: whether this rank writes the progress.
    """

    def __init__(  # noqa: PLR0913
        self, path: Path, max_length: int, maker: dict[str, Any], *, folder: Path, taps: tuple[int, ...], last: str,
        order: tuple[int, int], say: Callable[[str], None], leader: bool,
    ) -> None:  # fmt: skip
        super().__init__(path, max_length, None, last, maker)
        self.store_dir, self.taps, self.leader = folder, taps, leader
        self.wanted = {**maker, "window": order_of(self, *order, max_length)}
        self.waiting = Waiting(say)
        self.lock = hold(folder / "reader", "data.store") if leader else None  # for as long as this process lives
        self._store: Store | None = None
        self._place: dict[str, int] = {}
        self._load()

    def _load(self) -> None:
        """Reads the manifest anew. A shard may go between that and the look at it; in the next manifest it is not listed."""
        if not (self.store_dir / "manifest.json").is_file():
            return
        for attempts_left in (2, 1, 0):
            try:
                store = Store(self.store_dir)
                break
            except UserError:
                if not attempts_left:
                    raise
                time.sleep(0.1)
        self._check(store.manifest)
        self._forget()
        self._store, self._place = store, {name: place for place, name in enumerate(store.ids)}

    def _check(self, manifest: dict[str, Any]) -> None:
        maker = {key: self.wanted[key] for key in ("tokenizer_hash", "template_hash")}
        needs = {"taps": self.taps, "needs_last": self.last, "fingerprint": self.wanted["target"]["fingerprint"]}
        check_compatible({**manifest, "closed": True}, **needs, **maker)
        if found := differences({"window": manifest.get("window")}, {"window": self.wanted["window"]}):
            raise UserError(
                f"{self.store_dir}: its states are in another order ({'; '.join(found)}). Set these back, or delete the folder or set "
                f"data.store to a new one, and start `{command('capture')}` beside this"
            )

    def _forget(self) -> None:
        """Closes the shards: a file that is open takes its bytes even after it was deleted."""
        if self._store is not None:
            self._store.close()

    def ready(self, reads: list[tuple[int, int]]) -> bool:
        names = [read_id(micro, self.ids[i]) for micro, i in reads]
        if not all(name in self._place for name in names):
            self._load()
        missing = next((name for name in names if name not in self._place), None)
        if missing is None:
            self.waiting.over()
            return True
        what = f"the states of {missing.partition('/')[2]}, micro-batch {missing.partition('/')[0]}, in {self.store_dir}"
        self.waiting.on(what, self.store_dir.parent, "capture")
        return False

    def get(self, i: int, taps: tuple[int, ...], stop: int | None = None, with_last: bool = True, micro: int = 0) -> dict[str, Any]:
        assert self._store is not None, "ask `ready` first"
        return self._store.get(self._place[read_id(micro, self.ids[i])], taps, stop, with_last)

    def saved(self, micro: int, end: int) -> None:
        if self.leader:
            replace_text(self.store_dir / "reader" / "progress.json", json.dumps({"next": micro, "end": end}))
        self._forget()


class WindowWriter(StoreWriter):
    """The writer's side. UserError: the training went back to reads that are deleted, or a state is NaN or Inf."""

    def __init__(self, folder: Path, manifest: dict[str, Any], shard_tokens: int = 65536) -> None:
        super().__init__(folder, manifest, shard_tokens)
        self.next = (read_progress(folder) or (0, 0))[0]
        self.drop_past()

    def drop_past(self) -> int:
        """Deletes the shards that the training is past. Returns the bytes of those that stay."""
        now = (read_progress(self.folder) or (0, 0))[0]
        if now < self.next:
            raise UserError(
                f"{self.folder}: the training went back to micro-batch {now} after it had been past {self.next}; start "
                f"`{command('capture')}` again, which captures from there"
            )
        self.next = now
        self._keep([shard for shard in self.manifest["shards"] if last_micro(shard["ids"]) >= now])
        return sum(shard["bytes"] for shard in self.manifest["shards"])

    def begin_at(self, first_reads: Iterable[str]) -> None:
        """Drops everything where the first reads are not there: the training went back, and what lies ahead would take the room."""
        if not set(first_reads) <= self.done:
            self._keep([])

    def _keep(self, shards: list[dict[str, Any]]) -> None:
        names = {shard["file"] for shard in shards}
        gone = [shard for shard in self.manifest["shards"] if shard["file"] not in names]
        if not gone:
            return
        self.manifest["shards"] = shards
        self.write_manifest()  # first: a kill leaves files that no manifest lists, which the next writer deletes
        for shard in gone:
            (self.folder / shard["file"]).unlink()
            self.done -= set(shard["ids"])

    def has_room(self, sizes: Sizes) -> bool:
        """Whether one more sequence may go to the engine."""
        return self.drop_past() + sizes.room <= sizes.window

    def set_aside(self, name: str, reason: str) -> None:
        raise UserError(f"{self.folder}: {reason} of {name.partition('/')[2]}: delete its line in the answers, or set target.dtype=float32")


def last_micro(ids: list[str]) -> int:
    return max(int(name.partition("/")[0]) for name in ids)
