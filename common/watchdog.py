"""Who hangs, where, and for how long; and an orderly end on a signal.

Every rank publishes what it is doing (its phase) in the rendezvous store, between timed blocks,
never inside one. Three threads a rank watch over that, all asleep while a block is timed:

- the timer looks now and then whether any rank has changed its phase. After `timeout` seconds
  without a change it posts an event;
- the monitor calls nobody: it ends this process where the timer has long had no answer from the
  store, as behind a cut link, where TCP itself would wait for a quarter of an hour;
- the listener blocks in the store until any rank posts an event: a hang, a signal that one of
  them received, a case that failed on one of them, the end of the run. After a hang each rank
  answers the roll call and prints its stack. One that does not answer is stopped, dead, or out
  of reach; if it is on this host, its stack is dumped from outside and it is ended.

None of this uses the backend under test. Signals reach a thread through a pipe, because the
main thread may sit in a collective that never returns to Python.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common import job
from common.dist import FOREVER, PeerLost, RankContext, connect_store
from common.hang import publish_verdict, read_verdict, silence, state_of, where
from common.process import alive, dump_and_kill, start_time
from common.restarts import post_event

HANG = 3  # exit status
GRACE_S = 2.0  # for the answers to a roll call, and for a signal that explains a lost peer
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
END_S = 10.0  # for the report and the tables, when stdout or the disk does not answer
SHOWN = 16  # of the ranks that do not answer, in one line
POLL_S = 2.0  # between two looks of each rank at the others' progress, for up to 1000 ranks
CUT_OFF_S = 5.0  # longer than --timeout without the store: those who have it are to speak first

# Ends the report: called once with the new status and the reason, from any thread.
OnEnd = Callable[[str, str], None]


class Watchdog:
    """Watches over one rank of a job; `stop()` it when the run is over.

    on_end: called with ("interrupted" | "failed", reason) before this process is ended.
    """

    def __init__(self, ctx: RankContext, timeout: float, on_end: OnEnd) -> None:
        self._ctx = ctx
        self._timeout = timeout
        self._on_end = on_end
        self._host = socket.gethostname()
        pid = os.getpid()
        self._who = {"rank": ctx.rank, "host": self._host, "pid": pid, "started": start_time(pid)}
        # One connection for short calls, one for the listener, which blocks in it.
        self._store = connect_store(ctx, "watchdog")
        self._listening = connect_store(ctx, "watchdog")
        self._parent = os.getppid(), start_time(os.getppid())
        self._phase: dict[str, Any] = {"case": "start", "phase": "", "order": [0, 0]}
        self._abort: Callable[[], None] | None = None
        self._server = _server(ctx)
        # of thousands of ranks each looks less often: the store is to have 500 looks a second
        self._interval = min(timeout / 10, POLL_S * max(1.0, ctx.world_size / 1000))
        self._heard = time.monotonic()  # of the store, by the timer
        self._over = threading.Event()
        self._ending = threading.Lock()  # held by the thread that ends this process
        self.phase("")

        # Dumps all stacks from C: works in a process whose main thread never yields.
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        wake, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has SIGHUP
                signal.signal(number, lambda number, frame: None)  # the pipe's reader acts
        threads: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
            "signals": (self._handle_signals, (wake,)),
            "timer": (self._watch_progress, ()),
            "monitor": (self._watch_store, ()),
            "listener": (self._listen, ()),
        }
        self._threads = [
            threading.Thread(target=target, args=args, name=name, daemon=True)
            for name, (target, args) in threads.items()
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, case: str, order: tuple[int, ...], phase: str) -> None:
        """Say which case this rank enters.

        order: how far this rank is, to be compared with the others'; where one has fewer numbers
        only those count. Each further phase of the case adds 1 to the last.
        """
        self._publish({"case": case, "order": list(order), "phase": phase})

    def phase(self, phase: str) -> None:
        """Say what this rank does next. Two store calls: keep it out of timed code."""
        *case, last = self._phase["order"]
        self._publish(self._phase | {"phase": phase, "order": [*case, last + 1]})

    def alive(self) -> None:
        """Say that this rank waits for what is outside the job, and does not hang."""
        self._publish(self._phase)

    def _publish(self, phase: dict[str, Any]) -> None:
        self._phase = phase
        try:
            self._store.set(f"phase/{self._ctx.rank}", json.dumps(self._who | phase))
            self._store.add("changes", 1)
        except RuntimeError as error:
            raise PeerLost(f"the rendezvous store is gone: {error}") from error

    @contextlib.contextmanager
    def guard(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Abort the group here when the case fails on another rank, and the other way round.

        For NCCL, whose kernels wait for a failed peer for ever. gloo needs no help: its peers
        notice that the failed rank has closed its sockets.
        """
        if dist.get_backend(group) != "nccl":
            yield
            return
        self._abort = getattr(group, "abort", None)  # not in every version
        try:
            yield
        except Exception:
            self._abort = None
            attempt = self._phase["order"][0]
            if self._first(f"failed/{attempt}"):  # not all: every rank reads every event
                self._post({"kind": "case-failed", "attempt": attempt})
            raise
        finally:
            self._abort = None

    def stop(self, error: str = "") -> None:
        """End the watch: on every rank after the last barrier, or on one after an error.

        The error ends the other ranks.
        """
        over = {"kind": "failed", "rank": self._ctx.rank, "reason": f"{self._tag()} {error}"}
        self._over.set()
        # the store's host may have ended first, or be out of reach
        ended = f"ended/{self._ctx.rank}"  # in order: nobody is to call it dead
        _in_time(lambda: self._store.set(ended, ""), END_S)
        _in_time(lambda: self._post(over if error else {"kind": "over"}), END_S)
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        os.write(self._wakeup, b"\0")
        # a thread left inside the store would take the interpreter down with it at exit
        for thread in self._threads:
            thread.join(timeout=10)

    def lost_peer(self, error: BaseException) -> NoReturn:
        """End this process after the job broke, leaving the word to a signal that explains it.

        When a rank dies, the launcher ends the others within moments: then the run was
        interrupted. Without that it failed, and the ranks that do not answer are named.
        """
        first = _in_time(lambda: self._store.add("lost", 1) == 1)
        if first:  # not all: every rank reads every event
            self._post({"kind": "roll call"})
        time.sleep(GRACE_S)
        silent: list[str] | None = []
        if self._ctx.rank == 0 or first is not False:  # not all: it asks for every rank
            silent = _in_time(self._silent)
        self._ending.acquire()
        reason = f"{self._tag()} lost a peer: {'; '.join(silent or ()) or error}"
        self._speak_for_rank_0(reason, silent)
        self._exit(1, "failed", reason)

    # -- the threads ---------------------------------------------------------------------------

    def _handle_signals(self, wake: int) -> None:
        number = os.read(wake, 1)[0]
        while number not in SIGNALS:
            if number == 0:  # from stop()
                return
            number = os.read(wake, 1)[0]
        self._ending.acquire()
        reason = f"{signal.Signals(number).name} on {self._tag()}"
        if not alive(*self._parent):  # the kernel's signal, see cli.end_with_torchrun
            reason += f", after the process that started it ({self._parent[0]}) died"
        # where the timer waits for the store, this thread would, too
        cut_off = time.monotonic() - self._heard > self._interval + GRACE_S
        found = None if cut_off else _in_time(self._missing, 2 * GRACE_S)
        missing, asks = found or (None, True)
        if missing:  # the launcher's signal: this is what made it send one
            reason += f", {'; '.join(missing)}"
        if asks:
            self._speak_for_rank_0(reason, missing)
        self._finish("interrupted", reason)
        # for the ranks that had no signal
        _in_time(lambda: self._post({"kind": "signal", "signal": number, "reason": reason}))
        os._exit(128 + number)

    def _missing(self) -> tuple[list[str], bool]:
        """At a signal: who has died on this node, else who in the job does not answer.

        For the latter ask rank 0, for its report, and the first rank that had a signal; whether
        this one does.
        """
        dead = self._dead_neighbours()
        asks = self._ctx.rank == 0 or self._store.add("signalled", 1) == 1
        if asks:
            self._post({"kind": "roll call"})
        self._store.set(f"answer/{self._ctx.rank}", "here")
        if dead:
            return [f"after {'; '.join(dead)}"], asks
        return (self._silent(GRACE_S) if asks else []), asks

    def _dead_neighbours(self) -> list[str]:
        """The ranks of this node whose process has gone without a word."""
        self._store.set(f"ended/{self._ctx.rank}", "")  # this one is about to go with one
        first = self._ctx.rank - self._ctx.local_rank
        states = [state_of(self._store, first + i) for i in range(self._ctx.local_world_size)]
        return [
            f"rank {state['rank']} on {state['host']} died {where(state)}"
            for state in states
            if "pid" in state
            and not alive(state["pid"], state["started"])
            and not self._store.check([f"ended/{state['rank']}"])
        ]

    def _silent(self, patience: float = 0.0) -> list[str]:
        """The ranks that have neither answered the roll call nor ended in order."""
        ranks, limit = list(range(self._ctx.world_size)), time.monotonic() + patience
        while True:
            ranks = [
                rank
                for rank in ranks
                if not self._store.check([f"answer/{rank}"])
                and not self._store.check([f"ended/{rank}"])
            ]
            if not ranks or time.monotonic() > limit:
                texts = [silence(state_of(self._store, rank)) for rank in ranks[:SHOWN]]
                return texts + [f"nor do {len(ranks) - SHOWN} more"] * (len(ranks) > SHOWN)
            time.sleep(0.05)

    def _speak_for_rank_0(self, reason: str, missing: list[str] | None) -> None:
        """Say the reason here if rank 0 cannot, which else says it with its report.

        missing: as `_missing` has it; None where the store does not answer.
        """
        if self._ctx.rank == 0:
            return
        if missing is None and self._ctx.local_rank == 0:
            reason += f"; the rendezvous store {self._server} does not answer; "
            reason += f"this rank was {where(self._phase)}"
        elif not any("rank 0 on " in text for text in missing or ()):
            return
        self._print(reason if self._tag() in reason else f"{self._tag()} {reason}")

    def _first(self, what: str) -> bool:
        return bool(_in_time(lambda: self._store.add(what, 1)) == 1)

    def _watch_progress(self) -> None:
        seen, since = -1, time.monotonic()
        wait = self._interval
        while not self._over.wait(wait):
            try:
                changes = self._store.add("changes", 0)
            except RuntimeError:  # the store's host is gone, and with it the job
                changes = seen
            now = self._heard = time.monotonic()
            if changes != seen:
                seen, since = changes, now
            elif now - since > self._timeout:
                self._raise_hang(now - since)
            wait = max(min(self._interval, since + self._timeout - now), 0.01)

    def _raise_hang(self, seconds: float) -> None:
        if not self._post({"kind": "hang", "seconds": round(seconds)}):
            self._end_without_store(f"no progress for {seconds:.0f} s, and", "is gone")
        self._over.wait(FOREVER.total_seconds())  # the listener takes over

    def _watch_store(self) -> None:
        limit = self._timeout + CUT_OFF_S
        while not self._over.wait(max(self._heard + limit - time.monotonic(), 0.01)):
            silence = time.monotonic() - self._heard
            if silence > limit:
                # a thread that is ending this process may wait for the store, too
                if not self._ending.acquire(timeout=2 * END_S):
                    os._exit(HANG)
                self._end_without_store(f"no answer for {silence:.0f} s:", "is out of reach")

    def _end_without_store(self, what: str, how: str) -> NoReturn:
        """Of a rank that cannot ask who else is there; what it can say goes to its own stderr."""
        reason = f"HANG: {what} the rendezvous store {self._server} {how}"
        self._print(f"{self._tag()} {reason}; this rank was {where(self._phase)}")
        self._exit(HANG, "failed", reason)

    def _listen(self) -> None:
        for number in itertools.count(1):
            try:
                self._listening.wait([f"event/{number}"], FOREVER)
                event = json.loads(self._listening.get(f"event/{number}"))
            except RuntimeError:
                return  # the store ended; the timer and the main thread see to the rest
            if event["kind"] == "over" or self._over.is_set():
                return
            if event["kind"] == "failed":
                self._end(1, "failed", event["reason"])
            if event["kind"] == "signal":
                self._end(128 + event["signal"], "interrupted", event["reason"])
            if event["kind"] == "hang":
                self._roll_call(event["seconds"])
            if event["kind"] == "roll call":
                self._answer()
            if event["kind"] == "case-failed":
                self._abort_case(event["attempt"])

    def _abort_case(self, attempt: int) -> None:
        if self._abort is not None and attempt == self._phase["order"][0]:
            self._abort()

    def _post(self, event: dict[str, Any]) -> bool:
        try:
            post_event(self._store, event)
        except RuntimeError:  # the store is gone: its host ended first
            return False
        return True

    # -- after a hang --------------------------------------------------------------------------

    def _roll_call(self, seconds: int) -> NoReturn:
        self._ending.acquire()  # a signal from the launcher must not cut this short
        stack = "".join(traceback.format_stack(sys._current_frames()[_main_thread_id()]))
        self._print(f"{self._tag()} {where(self._phase)}, stack:\n{stack}")
        self._answer()
        time.sleep(GRACE_S)
        # one rank reads what all have left, and the others what it makes of that: a look of each
        # rank at every other would be millions of calls to the store in a job of thousands
        if self._first("roll"):
            publish_verdict(self._listening, self._ctx.world_size, seconds)
        found = _in_time(lambda: read_verdict(self._listening, self._ctx.rank), END_S)
        verdict, speaks, silent_here = found or (f"HANG: no progress for {seconds} s", False, [])
        if speaks:
            self._print(verdict)
            _record_for_torchrun(TimeoutError(verdict))
        for pid, started in silent_here:
            dump_and_kill(pid, started)
        if self._ctx.rank == 0:  # its host may serve the store, which ends with it
            _in_time(lambda: self._listening.wait(["all read"]))
        self._exit(HANG, "failed", verdict)

    def _answer(self) -> None:
        self._listening.set(f"answer/{self._ctx.rank}", "here")

    # -- ending --------------------------------------------------------------------------------

    def _end(self, status: int, report_status: str, reason: str) -> NoReturn:
        """End this process; the first thread that comes here does it."""
        self._ending.acquire()
        self._exit(status, report_status, reason)

    def _exit(self, status: int, report_status: str, reason: str) -> NoReturn:
        self._finish(report_status, reason)
        os._exit(status)

    def _finish(self, report_status: str, reason: str) -> None:
        def finish() -> None:
            with contextlib.suppress(Exception):  # nothing may keep the process from ending
                self._on_end(report_status, reason)
                sys.stdout.flush()

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(END_S)

    def _tag(self) -> str:
        return f"[rank {self._ctx.rank} {self._host}]"

    @staticmethod
    def _print(text: str) -> None:
        line = (text.rstrip("\n") + "\n").encode()

        def write() -> None:
            with contextlib.suppress(OSError):  # closed
                os.write(2, line)  # at once: ranks do not interleave

        _in_time(write)  # who reads it may be out of reach


def _server(ctx: RankContext) -> str:
    """Where the rendezvous store is."""
    store = ctx.store
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return "of this process"
    server = "torchrun's agent" if job.agent_serves_store(os.environ) else "rank 0"
    return f"of {server} at {store.host}:{store.port}"


def _record_for_torchrun(error: Exception) -> None:
    """Put the error into the summary that torchrun prints; without torchrun this does nothing."""
    try:
        raise error
    except Exception as raised:
        get_error_handler().record_exception(raised)


def _in_time(work: Callable[[], Any], seconds: float | None = None) -> Any:
    """The result of `work`; None where the store does not answer within moments."""
    results = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE_S if seconds is None else seconds)
    return results[0] if results else None


def _main_thread_id() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident
