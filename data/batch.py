"""From sequences and their states to packed batches. The sampler keeps no state: a step's batches follow from (seed, step, rank,
world) alone.

Each epoch shuffles the sequences, sorts them by length within windows (like lengths end up in one micro-batch), packs them to
the token budget and shuffles the micro-batches. Epochs follow each other without a gap, so that the tail of one shares a step
with the head of the next and no sequence is ever dropped. Step i takes world * accum micro-batches in a row; number j of
them goes to rank j % world.

Sequence parallelism needs no more than this: the ranks that share a micro-batch each take a run of its labels, and of its documents what
comes before the last of them. A head works out the rows that its labels need, so what is computed twice is what the context of a row
is to attention (keys, values, and what they are made of), and nothing but gradients is sent.

Shape suffixes: T tokens of a batch, S documents, L taps, D hidden.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from data.commands import command
from data.errors import UserError
from data.sequences import TOP, Sequences
from heads.base import Batch

WINDOW = 1024  # sequences sorted by length together: long enough to find like lengths, short enough to mix an epoch
QUEUED_STEPS = 2
POLL_SECONDS = 0.5  # between two looks for what is not there yet


def pack(members: Iterable[int], lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Cuts `members`, in their order, into runs of at most `budget` tokens in all; one longer than the budget runs alone."""
    runs: list[list[int]] = []
    room = 0
    for i in members:
        length = int(lengths[i])
        if not runs or length > room:
            runs.append([])
            room = budget
        runs[-1].append(i)
        room -= length
    return runs


def share_out(documents: list[dict[str, Any]], place: int, share: int) -> list[dict[str, Any]]:
    """Run number `place` of `share` equal runs of the documents' labels, each document cut behind its last one. Documents without a label
    of the run are left out; where none has any, the first is kept without labels."""
    labels = [document["loss_mask"].nonzero().squeeze(1) for document in documents]
    total, done, kept = sum(map(len, labels)), 0, []
    first, end = total * place // share, total * (place + 1) // share
    for document, label in zip(documents, labels, strict=True):
        mine = label[max(first - done, 0) : max(end - done, 0)]
        done += len(label)
        if len(mine) or (done == total and not kept):
            mask = torch.zeros_like(document["loss_mask"]).index_fill_(0, mine, True)
            upto = int(mine[-1]) + 1 if len(mine) else 1
            cut = {key: None if x is None else x[:upto] for key, x in document.items() if key != "kv"}
            kept.append(cut | {"loss_mask": mask[:upto], "kv": [x[:upto] for x in document["kv"]]})
    return kept


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """End to end; where there is a GPU in pinned memory, out of which it copies by itself and several times faster."""
    if not torch.cuda.is_available():
        return torch.cat(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


def on_one_core() -> None:
    """Where a CPU trains: from now on torch's operations on the calling thread start no others. With a second team of OpenMP threads there
    would be more of them than cores, and those of the training would no longer spin between its operations: on two cores a fifth of its
    speed. (torch.set_num_threads is for all threads at once.)"""
    if torch.cuda.is_available():
        return
    torch.get_num_threads()  # for the first time on a thread it also sets its number
    with suppress(AttributeError):  # a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


class Batches:
    """Packed batches of one rank. Documents are cut to max_length (`cut` counts them); those without a label within it are
    left out (`skipped`). `waited`: seconds that consumers of `prefetch` have waited for data so far.

    taps: layers applied, in the head's order. share: neighbouring ranks that share each micro-batch of the training.
    UserError where no sequence has a label.
    """

    def __init__(  # noqa: PLR0913
        self, store: Sequences, taps: tuple[int, ...], micro_tokens: int, seed: int, rank: int, world: int, max_length: int, share: int = 1
    ) -> None:
        assert 0 <= rank < world and world % share == 0 and micro_tokens > 0 and max_length > 0
        self.group, self.groups, self.place, self.share = rank // share, world // share, rank % share, share
        self.store, self.taps, self.micro_tokens, self.seed = store, taps, micro_tokens, seed
        self.rank, self.world, self.max_length = rank, world, max_length
        self.lengths = np.minimum(store.lengths, max_length)
        usable = store.first_labels < self.lengths
        self.members = np.flatnonzero(usable)
        self.skipped = int((~usable).sum())
        self.cut = int((store.lengths[usable] > max_length).sum())
        self.waited = 0.0
        if not len(self.members):
            raise UserError(
                f"{store.folder}: none of its {len(store)} sequences has a supervised token within data.max_length={max_length}; "
                f"raise data.max_length, or mend the chat template and capture again with `{command('capture')}`"
            )
        self._plan = functools.lru_cache(maxsize=2)(self._plan_epoch)  # two: a step may span the end of an epoch
        self._size = functools.cache(lambda epoch: len(self._plan(epoch)))

    def _plan_epoch(self, epoch: int) -> list[list[int]]:
        """The micro-batches of an epoch, each a list of sequence numbers; the same on every rank."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.members)
        windows = [order[i : i + WINDOW] for i in range(0, len(order), WINDOW)]
        grouped = np.concatenate([window[np.argsort(self.lengths[window], kind="stable")] for window in windows])
        runs = pack(grouped.tolist(), self.lengths, self.micro_tokens)
        return [runs[i] for i in rng.permutation(len(runs))]

    def _micro(self, index: int) -> list[int]:
        """Micro-batch `index` of the endless row of epochs."""
        epoch = 0
        while index >= self._size(epoch):
            index -= self._size(epoch)
            epoch += 1
        return self._plan(epoch)[index]

    def _batch(self, members: list[int], micro: int = 0, place: int = 0, share: int = 1) -> Batch:
        """micro: its number in the row of epochs. place, share: of the labels the run number `place` of `share` equal ones."""
        documents = [self.store.get(i, self.taps, self.max_length, micro=micro) for i in members]
        if share > 1:
            documents = share_out(documents, place, share)
        offsets_S1 = torch.tensor([0, *itertools.accumulate(len(document["token_ids"]) for document in documents)], dtype=torch.int64)
        loss_mask_T = joined([document["loss_mask"] for document in documents])
        loss_mask_T[offsets_S1[:-1]] = False  # no state of its own document predicts a first token
        return Batch(
            token_ids_T=joined([document["token_ids"] for document in documents]),
            loss_mask_T=loss_mask_T,
            offsets_S1=offsets_S1,
            taps_TLD=joined([document["taps"] for document in documents]) if self.taps else None,
            last_TD=None if documents[0]["last"] is None else joined([document["last"] for document in documents]),
            kv=[joined(list(parts)) for parts in zip(*(document["kv"] for document in documents), strict=True)],
            **{f"{key}_TC": joined([document[key] for document in documents]) for key in TOP if documents[0][key] is not None},
        )

    def step(self, i: int, accum: int) -> list[Batch]:
        """This rank's `accum` micro-batches of step i (from 0): token_ids int64, loss_mask bool, states in the stored dtype."""
        return [self._batch(self._micro(index), index, self.place, self.share) for index in self._micros(i, accum)]

    def tokens(self, i: int, accum: int) -> float:
        """This rank's part of the tokens of step i; shared ones in equal parts."""
        return sum(int(self.lengths[self._micro(index)].sum()) for index in self._micros(i, accum)) / self.share

    def _micros(self, i: int, accum: int) -> range:
        first = i * self.groups * accum
        return range(first + self.group, first + self.groups * accum, self.groups)

    def reads(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """(micro-batch, sequence) of all that is read for micro-batches first .. end - 1 of the row, in order."""
        return ((index, member) for index in range(first, end) for member in self._micro(index))

    def sequences(self, i: int, accum: int) -> list[str]:
        """Ids of the sequences that all ranks together read in step i."""
        per_step = self.groups * accum
        return [self.store.ids[member] for _, member in self.reads(i * per_step, (i + 1) * per_step)]

    def ready(self, i: int, accum: int) -> bool:
        """Whether the states of step i are there for all ranks: then none of them waits for another within a step."""
        per_step = self.groups * accum
        return self.store.ready(list(self.reads(i * per_step, (i + 1) * per_step)))

    def saved(self, done: int, steps: int, accum: int) -> None:
        """A checkpoint holds `done` of `steps` steps: what they read is not read again. On every rank."""
        self.store.saved(done * self.groups * accum, steps * self.groups * accum)

    def prefetch(self, first_step: int, last_step: int, accum: int) -> Generator[list[Batch], None, None]:
        """Yields step(i, accum) for i in [first_step, last_step), read ahead by one thread. Its exceptions are raised here; the
        thread ends when the generator is closed or used up.
        """
        ready: queue.Queue[list[Batch] | Exception] = queue.Queue(maxsize=QUEUED_STEPS)
        stop = threading.Event()

        def put(item: list[Batch] | Exception) -> None:
            while not stop.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def produce() -> None:
            on_one_core()
            try:
                for i in range(first_step, last_step):
                    if not self._await(i, accum, stop):
                        return
                    put(self.step(i, accum))
            except Exception as error:
                put(error)

        thread = threading.Thread(target=produce, name="prefetch", daemon=True)
        thread.start()
        try:
            for _ in range(first_step, last_step):
                start = time.perf_counter()
                item = ready.get()
                self.waited += time.perf_counter() - start
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join()

    def _await(self, i: int, accum: int, stop: threading.Event) -> bool:
        """Returns once step i is ready, or false at `stop`."""
        while not stop.is_set():
            if self.ready(i, accum):
                return True
            stop.wait(POLL_SECONDS)
        return False

    def validation(self) -> Iterator[Batch]:
        """The whole store once, in order, micro-batch m on rank m % world. Ranks may get unequal numbers, or none: the caller
        adds up sums and counts over the ranks after its last batch, and runs no collective per batch.
        """
        runs = pack(self.members.tolist(), self.lengths, self.micro_tokens)
        for members in runs[self.rank :: self.world]:
            yield self._batch(members)
