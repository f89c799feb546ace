# SPDX-License-Identifier: Apache-2.0
"""Up to 64 ranks in one process: threads under torch's threaded process group, one at a time.

torch.testing's threaded group has ranks as threads of one process, with a default group, process
groups and DeviceMeshes of their own; DDP's reducer, FSDP2 and DTensor run on it unchanged. What
this file adds: a rank runs until it waits in a collective, then another one, in an order drawn from
a seed, so that a history is the same each time; calls that meet are compared; and a wait that
nothing can end is an error at once, instead of after a group's timeout.
(torch.distributed._local_tensor runs one program for all ranks: it knows of no rank that goes its
own way, and neither does the fake group, which only counts.)
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils import _pytree as pytree

#: What a group made here says it would have waited for a rank that does not come.
TIMEOUT = "1800 s"


class CallMade(NamedTuple):
    """A collective as one rank has made it."""

    kind: str
    """As torch's threaded group names it: "AllReduce", "AllGather"."""
    ranks: int
    """How many members the group has."""
    sizes: tuple[tuple[str, int], ...]
    """dtype and number of elements of each tensor."""

    @property
    def bytes(self) -> int:
        """Of the tensors given, the larger side where a collective has an input and an output."""
        return max(
            (count * getattr(torch, dtype).itemsize for dtype, count in self.sizes), default=0
        )


class Outcome(NamedTuple):
    """What a rank did."""

    result: Any
    error: BaseException | None
    calls: list[CallMade]


class RanksDifferError(Exception):
    """Members of a group have met in different calls."""


class NobodyComesError(dist.DistBackendError):
    """A rank waits for others that have ended or wait elsewhere: a real group's timeout."""


class _Rank:
    def __init__(self, number: int) -> None:
        self.number = number
        self.turn = threading.Semaphore(0)
        self.state = "ready"  # Or "waiting", "over".
        self.waits_in = ""
        self.fault: Exception | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.calls: list[CallMade] = []


class _Board:
    """Who runs, and who waits for whom. One thread at a time uses it: the one whose turn it is."""

    def __init__(self, count: int, seed: int) -> None:
        self.ranks = [_Rank(number) for number in range(count)]
        self.draw = random.Random(seed)
        self.meetings: dict[str, dict[int, tuple[_Rank, CallMade, Any, Any]]] = {}
        self.finished = threading.Event()

    def pass_on(self) -> None:
        """Gives the turn to a rank that can use it."""
        ready = [rank for rank in self.ranks if rank.state == "ready"]
        if not ready:
            ready = [rank for rank in self.ranks if rank.state == "waiting"]
            for rank in ready:
                rank.fault = NobodyComesError(
                    f"rank {rank.number}: timed out after {TIMEOUT} (simulated) in {rank.waits_in}"
                )
                rank.state = "ready"
            self.meetings.clear()
        if ready:
            self.draw.choice(ready).turn.release()
        else:
            self.finished.set()

    def meet(self, group: Any, collective: Any, place: int, data: Any) -> Any:
        me: _Rank = _of_thread.rank
        tensors = [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, torch.Tensor)]
        sizes = tuple((str(t.dtype).removeprefix("torch."), t.numel()) for t in tensors)
        call = CallMade(type(collective).__name__, group.size(), sizes)
        me.calls.append(call)
        here = self.meetings.setdefault(group.pg_name, {})
        here[place] = (me, call, collective, data)
        if len(here) < group.size():
            me.state, me.waits_in = "waiting", f"{call} of group {group.pg_name}"
            self.pass_on()
            me.turn.acquire()
        else:
            del self.meetings[group.pg_name]
            self._work([here[place] for place in range(len(here))])
        if me.fault is not None:
            fault, me.fault = me.fault, None
            raise fault
        return threaded.ret_work(data)

    @staticmethod
    def _work(members: list[tuple[_Rank, CallMade, Any, Any]]) -> None:
        made = {member[1] for member in members}
        # Of ranks that scatter or broadcast, one gives more than the others.
        if len(made) > 1 and members[0][1].kind not in ("Scatter", "Gather"):
            for rank, call, *_ in members:
                rank.fault = RanksDifferError(f"rank {rank.number} came with {call}, of {made}")
        else:
            members[0][2].work([member[3] for member in members])
        for rank, *_ in members:
            rank.state = "ready"


class _Joining:
    """Stands for torch's ``Collective``: what one rank has called."""

    def __init__(self, collective: Any, group: Any) -> None:
        self._collective, self._group = collective, group

    def join(self, place: int, data: Any) -> Any:
        return _of_thread.board.meet(self._group, self._collective, place, data)


class _Group(threaded.ProcessLocalGroup):
    pass


class _World(threaded.ThreadLocalWorld):
    comms: ClassVar[list[Any]] = []  # torch 2.11 lacks it here, and destroying a group wants it.


def _make_group(_store: Any, rank: int, size: int, _timeout: Any) -> Any:
    return _Group(rank, size)


_of_thread = threading.local()
# Threads are kept: DTensor's dispatcher leaves state in them that does not outlive them well.
_threads: list[queue.SimpleQueue[Callable[[], None]]] = []


def _serve(tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()


def _live(board: _Board, rank: _Rank, work: Callable[[int], Any], store: Any) -> None:
    _of_thread.board, _of_thread.rank = board, rank
    rank.turn.acquire()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            dist.init_process_group(
                "simulated", rank=rank.number, world_size=len(board.ranks), store=store
            )
            try:
                rank.result = work(rank.number)
            finally:
                dist.destroy_process_group()
    except BaseException as error:
        rank.error = error
    rank.state = "over"
    board.pass_on()


def own_calls() -> list[CallMade]:
    """The collectives that the rank that asks has made so far."""
    calls: list[CallMade] = _of_thread.rank.calls
    return calls


def run_on_ranks(count: int, work: Callable[[int], Any], seed: int = 0) -> list[Outcome]:
    """Runs ``work(rank)`` on each of ``count`` simulated ranks, with a default group of them all.

    ``seed`` decides in which order ranks run that could. Never waits for a rank that hangs in a
    collective; one that waits for anything else makes this wait too.
    """
    if "simulated" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simulated", _make_group, devices=["cpu"])
    while len(_threads) < count:
        _threads.append(queue.SimpleQueue())
        threading.Thread(target=_serve, args=(_threads[-1],), daemon=True).start()
    board, store = _Board(count, seed), dist.HashStore()
    begin, end = threaded.ProcessLocalGroup._start_coll, threaded.ProcessLocalGroup._end_coll
    world = dist.distributed_c10d._world
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode
    try:
        threaded.ProcessLocalGroup._start_coll = staticmethod(_Joining)
        threaded.ProcessLocalGroup._end_coll = staticmethod(lambda *_: None)
        dist.distributed_c10d._world = _World()
        isolate(True)
        for rank, tasks in zip(board.ranks, _threads, strict=False):
            tasks.put(lambda rank=rank: _live(board, rank, work, store))
        board.pass_on()
        board.finished.wait()
    finally:
        isolate(False)
        dist.distributed_c10d._world = world
        threaded.ProcessLocalGroup._start_coll = begin
        threaded.ProcessLocalGroup._end_coll = end
    return [Outcome(rank.result, rank.error, rank.calls) for rank in board.ranks]
