"""Hang detection, aborts of failed cases, and an orderly end on a signal: docs/reliability.md.

Each rank writes its current activity (its phase) to the store, between timed blocks and never
inside one. A thread of each rank polls the store, twice a second in a small job, for two events:

- No rank has changed its phase for `timeout` seconds: a hang. All these threads answer a roll call.
  A rank that does not answer is stopped, dead or unreachable. A rank that answers either is behind
  the other ranks or waits for them. One rank prints the result.
- A rank of the case has failed. The other ranks then abort the case's groups too. Otherwise they
  would wait forever in a collective that the failed rank has left.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from common.groups import Group, abort_group, lost_peer
from harness.benchmark import NO_TIMEOUT, TORCH_WAITS, Benchmark, Observer
from harness.environment import ERROR_HANDLING, torchrun_set_error_handling
from harness.exits import HANG, exit_now, write_error_file, write_stderr

STORE_CHECK_S = 1.0  # interval between checks whether the store answers
STORE_LOST_S = 10.0  # a store that is silent for --timeout, two polls and this long is lost
GRACE_S = 2.0  # a roll call waits for answers this long, in addition to a poll interval
SIMULTANEOUS_S = 0.01  # signals that arrive within this time count as simultaneous
POLLS_PER_S = 500  # limit on polls of the store by all ranks together
MOST_STACKS = 64  # in a larger job only some ranks print their stacks
MOST_NAMED = 16  # ranks in the same state that get a line each
SILENT = "does not answer (stopped, dead or unreachable)"
LATE = "is behind the other ranks"
WAITS = "waits"
GLOO_RECORDER = "_dump_fr_trace_json"  # missing in older versions: hangs then name phases only
PR_SET_PDEATHSIG = 1  # of Linux's prctl

SETTINGS = {  # for NCCL in torch, unless the user has set them; docs/gpus.md lists them
    # Our watchdog ends a hang. NCCL's own would end the process a minute after a failed case.
    ERROR_HANDLING: "0",
    # After a failed case NCCL's watchdog would wait four times this long for others' dumps.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # A lost device ends the run with a reason. NCCL's watchdog would abort the process instead.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}

State = dict[str, Any]  # of a rank: its current phase and its answer to a roll call


class Watchdog(Observer):
    """The hang detection of this rank."""

    @classmethod
    def before_join(cls, args: argparse.Namespace) -> dict[str, timedelta]:
        """Replace torch's own timeouts, and NCCL's watchdog, by this one."""
        restart_exit_timer(args.timeout)
        set_nccl_variables()
        longer = TORCH_WAITS * timedelta(seconds=args.timeout)
        return {"timeout": min(NO_TIMEOUT, longer), "control_timeout": NO_TIMEOUT}

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        job = self.job = bench.job
        self.timeout_s: float = bench.args.timeout
        self.report = bench.report
        self.store = dist.PrefixStore("watchdog", job.store)  # for the main thread
        # for the polling thread, which must not block while the main thread waits for a key
        self.watched = dist.PrefixStore("watchdog", job.second_store or job.store.clone())
        self.phases = [f"phase/{rank}" for rank in range(job.world_size)]  # keys of the store
        self.stopped = threading.Event()
        self.answers = 0  # of the store, counted by both threads
        self.poll_s = max(0.5, job.world_size / POLLS_PER_S)
        self.case = 0  # the number of the case
        self.failed_case = 0  # the most recent one whose failure the polling thread has seen
        # determined now, because a rank gets another parent if its launcher dies before a hang
        self.launcher = launcher_of(os.getpid())
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        self.store.set(f"answer/{job.rank}", json.dumps({"last": None}))
        self.begin("start", member=True)
        self.phase("setup", ahead=1)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        threading.Thread(target=self._check_store, name="listener", daemon=True).start()
        self._end_on_signals()

    def begin(self, label: str, member: bool) -> None:
        self.label = label
        # The polling thread aborts the group if a rank of the case fails. Clear it before the case
        # number changes, so that it is never taken for a group of the next case.
        self.group: Group | None = None
        self.case += 1
        self.order = 0 if member else -1  # so that ranks outside the case stay in phase number 0

    def opened(self, group: Group | None) -> None:
        self.group = group  # None before it is closed: two threads must not abort the same group

    def phase(self, what: str, ahead: int) -> None:
        if not what:
            return
        self.order += ahead
        rank, host = self.job.rank, socket.gethostname()
        self.where = f"rank {rank} on {host}, case '{self.label}', {what}"
        state: State = {"rank": rank, "where": self.where, "order": [self.case, self.order]}
        error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        state |= {"host": host, "pid": os.getpid(), "folder": error_file.parent.name}
        with lost_peer():
            self.store.set(f"phase/{rank}", json.dumps(state))
            self.store.add("changes", 1)
        restart_exit_timer(self.timeout_s)
        self.answers += 1

    def failed(self, reason: str) -> None:
        """Let the other ranks of the case abort its groups at their next poll."""
        with lost_peer():
            self.store.set(f"failed/{self.case}", "")
            self.store.add("changes", 1)

    def ended(self) -> dict[int, str]:
        """Return the ranks of this host whose processes have ended, with their last phase. If the
        store is gone, and rank 0 served it, rank 0 has ended."""
        ended: dict[int, str] = {}
        until = time.monotonic() + GRACE_S  # a process closes its sockets before it has ended
        try:
            while not ended and time.monotonic() < until:
                time.sleep(0.1)
                for state in map(json.loads, self.store.multi_get(self.phases)):
                    here = state["host"] == socket.gethostname()
                    if here and not is_running(state["pid"]):
                        ended[state["rank"]] = f"{state['where']}, has ended"
        except RuntimeError:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                ended[0] = "rank 0, which served the rendezvous store, has ended"
        return ended

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join(5)
        faulthandler.cancel_dump_traceback_later()  # last, because the thread restarts the timer

    def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while not self.stopped.wait(self.poll_s):
            try:
                changes = self.watched.add("changes", 0)
                self.answers += 1
                changed = changes != seen
                if changed:
                    seen, since = changes, time.monotonic()
                    # A rank that only waits announces no phases. Its timer must not end it while
                    # the job makes progress.
                    restart_exit_timer(self.timeout_s)
                    if self.watched.check(["hang"]):
                        self._roll_call()
                elif time.monotonic() - since > self.timeout_s:
                    self.watched.set("hang", "")  # all ranks see it at their next poll
                    self.watched.add("changes", 1)
                self._abort_failed(changed)
            except RuntimeError:  # the store's host has died, or the run has ended
                if not self.stopped.wait(10):
                    exit_now(1, f"{self.where}: the rendezvous store is gone")

    def _check_store(self) -> None:
        """End this process if the store stops answering: then no roll call reaches it."""
        silent_s, before = 0.0, self.answers
        # counted in waits rather than by the clock, because this process may have been stopped
        while not self.stopped.wait(STORE_CHECK_S):
            silent_s = silent_s + STORE_CHECK_S if self.answers == before else 0.0
            before = self.answers
            if silent_s >= self.timeout_s + 2 * self.poll_s + STORE_LOST_S:
                faulthandler.dump_traceback(all_threads=True)
                served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                server = "torchrun's agent" if served else "rank 0"
                reason = (
                    f"HANG: {socket.gethostname()} has lost the other ranks: the rendezvous store, "
                    f"served by {server}, has not answered for {silent_s:g} s; {self.where}"
                )
                exit_now(HANG, reason)

    def _abort_failed(self, changed: bool) -> None:
        """Abort the groups of a case that has failed, and at later polls those created since."""
        case, group = self.case, self.group
        if changed and self.watched.check([f"failed/{case}"]):
            self.failed_case = case
        if group and case == self.case == self.failed_case:
            abort_group(group)

    def _roll_call(self) -> NoReturn:
        """Answer the roll call, let one rank print the result, and end this process."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(frame)).rstrip()
        group, number, text = last_collective()
        self.watched.set(f"answer/{self.job.rank}", json.dumps({"last": [group, number]}))
        time.sleep(GRACE_S + self.poll_s)  # the last rank polls up to this much later
        headline = f"HANG: no progress for {self.timeout_s:g} s"
        reason, silent, with_stack = headline, [], []
        if self.watched.add("reporter", 1) == 1:
            phases = self.watched.multi_get(self.phases)
            # `last`: the last collective as [group, number], or None without an answer
            answers = self.watched.multi_get([f"answer/{r}" for r in range(self.job.world_size)])
            states = [json.loads(p) | json.loads(a) for p, a in zip(phases, answers, strict=True)]
            by_state = ranks_by_state(states)
            lines = lines_by_state(by_state)
            reason = f"{headline}; {lines[0]}"
            write_stderr("\n".join([headline, *lines]))
            late, waiting = by_state[LATE], by_state[WAITS]
            if self.job.world_size > MOST_STACKS:
                late, waiting = late[:MOST_NAMED], waiting[:1]
            with_stack = [state["rank"] for state in late + waiting]
            self.watched.set("result", json.dumps([reason, by_state[SILENT], with_stack]))
        with contextlib.suppress(RuntimeError):  # no rank ends before one has printed the result
            reason, silent, with_stack = json.loads(self.watched.get("result"))
        if self.job.rank in with_stack:
            write_stderr(f"{self.where}; last collective {text}\n{stack}")
        self._kill_silent(silent, reason)
        exit_now(HANG, reason, prints=False)

    def _kill_silent(self, silent: list[State], reason: str) -> None:
        """End the silent ranks that this rank's launcher started on this host. Any process with
        access to the store can change their states."""
        own = os.environ.get("TORCHELASTIC_ERROR_FILE")
        for state in silent:
            if state["host"] == socket.gethostname() and self._is_sibling(state["pid"]):
                if own and str(state["folder"]).isdigit():  # torchrun: .../LOCAL_RANK/error.json
                    path = Path(own).parents[1] / str(state["folder"]) / Path(own).name
                    write_error_file(reason, str(path))
                print_stacks_and_kill(state["pid"])

    def _is_sibling(self, pid: Any) -> bool:
        """Whether this is the PID of a process that this rank's launcher has started."""
        known = self.launcher is not None and isinstance(pid, int)
        return known and launcher_of(pid) == self.launcher

    def _end_on_signals(self) -> None:
        """End in order on Ctrl-C, SIGTERM and SIGHUP, even while the main thread waits in C code:
        another thread reads the wakeup pipe, which receives a byte for each signal. Of simultaneous
        signals the lowest number counts: torchrun sends SIGINT and SIGTERM within a millisecond of
        a second Ctrl-C, and the kernel may run SIGTERM's handler first."""
        read, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup ignores it
            ends.remove(signal.SIGHUP)
        for number in ends:
            signal.signal(number, lambda *_: None)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks of torchrun end with it, however it ends
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        def wait() -> None:
            came: set[int] = set()
            while not came:
                select.select([read], [], [])
                time.sleep(SIMULTANEOUS_S)
                came = set(os.read(read, 4096)) & set(ends)
            number = min(came)
            count, path = len(self.report.cases), self.report.path
            line = f"{signal.Signals(number).name}: ended after {count} case{'s' * (count != 1)}"
            if path not in (None, "-"):
                line += f", saved in {path}; use --resume to continue"
            exit_now(128 + number, line, prints=self.job.rank == 0)

        threading.Thread(target=wait, name="signals", daemon=True).start()


def set_nccl_variables() -> None:
    """Set variables that torch reads when it creates the first NCCL group, except the user's."""
    if torchrun_set_error_handling():
        del os.environ[ERROR_HANDLING]
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def restart_exit_timer(timeout_s: float) -> None:
    """Restart the timer of last resort, which prints all stacks and ends this process some time
    after a hang would have been reported. It is in C and needs neither Python nor the store."""
    faulthandler.dump_traceback_later(timeout_s * 1.5 + 20, exit=True)


def launcher_of(pid: int) -> int | None:
    """Return the PID of the process that started a rank, such as torchrun's agent; None if it is
    not visible. A wrapper between them is skipped: its environment has the rank's variables."""
    of_a_rank = "TORCHELASTIC_RUN_ID" if "TORCHELASTIC_RUN_ID" in os.environ else "RANK"
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        parent = psutil.Process(pid).parent()
        with contextlib.suppress(psutil.AccessDenied):  # of another user, so it is no wrapper
            while parent and of_a_rank in parent.environ():
                parent = parent.parent()
        return parent.pid if parent else None
    return None


def is_running(pid: Any) -> bool:
    """Return whether there is such a process on this host. A zombie has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def print_stacks_and_kill(pid: int) -> None:
    """Let a silent process on this host print its stacks, then kill it."""
    with contextlib.suppress(OSError):  # another rank was faster
        os.kill(pid, signal.SIGUSR2)  # faulthandler prints its stacks
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)


def ranks_by_state(states: list[State]) -> dict[str, list[State]]:
    """Sort the ranks into those that do not answer, that are behind in the phases of the case or in
    the collectives of a group, and that wait. A rank outside the case, in phase 0, is never late.
    """
    answered = [state for state in states if state["last"]]
    furthest_phase = max(state["order"] for state in answered)
    last_number: dict[str, int] = {}  # of the collectives of each group
    for state in answered:
        group, number = state["last"]
        last_number[group] = max(number, last_number.get(group, number))
    by_state: dict[str, list[State]] = {SILENT: [], LATE: [], WAITS: []}
    for state in states:
        name = SILENT
        if state["last"]:
            group, number = state["last"]
            behind = state["order"] < furthest_phase or number < last_number[group]
            name = LATE if behind and state["order"][1] != 0 else WAITS
        by_state[name].append(state)
    return by_state


def lines_by_state(by_state: dict[str, list[State]]) -> list[str]:
    """Return a line for each rank; of many in the same state the first ones and a count."""
    lines: list[str] = []
    for name, states in by_state.items():
        lines += [f"{state['where']}: {name}" for state in states[:MOST_NAMED]]
        if len(states) > MOST_NAMED:
            lines.append(f"and {len(states) - MOST_NAMED:,} more: {name}")
    return lines


def last_collective() -> tuple[str, int, str]:
    """Return the last collective that this rank called: its group, its number within the group
    (from 1; 0 if there is none) and a description."""
    entries = recorded_collectives()
    if not entries:  # joining the job takes collectives, so older versions have recorded nothing
        return "none", 0, "unknown: this torch has no record"
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    group, number = last["process_group"][0], last.get("collective_seq_id") or 0
    what = f"{last['profiling_name']} of {last.get('input_sizes')}"
    return group, number, f"{what}, number {number} of group {group}"


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the entries of this rank's flight recorder, of all backends. Private API, in
    torch/csrc/distributed/c10d; works in torch 2.11, 2.14 and 2.15 (with NCCL: on tests/cudalab
    only)."""
    dumps: list[tuple[str, dict[str, str]]] = [
        (GLOO_RECORDER, {}),
        ("_dump_nccl_trace_json", {}),  # of NCCL
        (GLOO_RECORDER, {"backend": "nccl2"}),
    ]
    entries: list[dict[str, Any]] = []
    for name, options in dumps:
        with contextlib.suppress(Exception):  # this torch may lack it
            dump = getattr(torch._C._distributed_c10d, name)
            entries += json.loads(dump(**options))["entries"]
    return entries
