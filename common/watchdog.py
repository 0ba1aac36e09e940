"""Who hangs, and where; who failed; an orderly end on a signal. Examples: docs/reliability.md.

Each rank writes into the store what it is doing (its phase), between timed blocks and never inside
one. A thread of each rank reads the store, twice a second in a small job. It looks for two things:

- No rank has changed its phase for `timeout` seconds. That is a hang, and all these threads answer
  a roll call. A rank that does not answer is stopped, dead or out of reach. A rank that answers but
  is behind others did not arrive. One rank speaks for all.
- A rank of the case has failed. Then this rank aborts the case's group as well, or it would wait
  for ever in a collective that the other rank has left.
"""

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
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from common.cli import HANG, end, tell_torchrun, write
from common.groups import Group, Job, abort_group, peers
from common.report import Report

LISTEN_S = 1.0  # between two looks at whether the store answers
CUT_OFF_S = 10.0  # beyond --timeout and two polls: a store that is silent for so long is lost
GRACE_S = 2.0  # how long a roll call waits for answers, beyond the time between two looks
TOGETHER_S = 0.01  # signals that follow each other this closely count as sent at once
RANKS_A_LOOK = 500  # so many ranks may look into the store each second
MOST_STACKS = 64  # in a larger job few ranks print their stack
MOST_NAMED = 16  # ranks of one fate, a line each
SILENT = "does not answer (stopped, dead or out of reach)"
LATE = "did not arrive"
WAITS = "waits"
PR_SET_PDEATHSIG = 1  # of Linux's prctl

State = dict[str, Any]  # of a rank: its last phase, and what it answers to a roll call


class Watchdog:
    """Create it once the ranks have met; call `stop` before the process leaves the job."""

    def __init__(self, job: Job, timeout_s: float, report: Report) -> None:
        self.job, self.timeout_s, self.report = job, timeout_s, report
        self.store = dist.PrefixStore("watchdog", job.store)  # for the main thread
        # for the watching thread, which must not wait while the main thread waits for a key
        self.watched = dist.PrefixStore("watchdog", job.second_store or job.store.clone())
        self.over = threading.Event()
        self.answers = 0  # of the store, counted by both threads
        self.poll_s = max(0.5, job.world_size / RANKS_A_LOOK)  # the time between two looks
        self.case = 0  # the number of the case
        self.failed_case = 0  # the newest one that the watching thread has seen fail
        # not at a hang: this rank has another parent if its launcher has ended by then
        self.launcher = launcher_of(os.getpid())
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        self.store.set(f"answer/{job.rank}", "")
        self.begin("start")
        self.phase("set up")
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        self._end_on_signals()

    def begin(self, label: str, member: bool = True) -> None:
        """Begin a new case; its first phase tells the others. A rank outside it waits, and is never
        behind the case's ranks."""
        self.label = label
        # The group is aborted when a rank of the case fails. It goes before the case's number
        # changes, so that the watching thread never takes it for a group of the next case.
        self.group: Group | None = None
        self.case += 1
        self.order = 0 if member else -1  # so that ranks outside the case stay in phase number 0

    def phase(self, what: str, ahead: int = 1) -> None:
        """Say what comes next. This calls the store: keep it out of timed code.

        ahead: 0 for what only this rank does, so that the others do not count as behind it.
        """
        self.order += ahead
        rank, host = self.job.rank, socket.gethostname()
        self.where = f"rank {rank} on {host}, case '{self.label}', {what}"
        state: State = {"rank": rank, "where": self.where, "order": [self.case, self.order]}
        state |= {"host": host, "pid": os.getpid()}
        state["error_file"] = os.environ.get("TORCHELASTIC_ERROR_FILE")
        with peers():
            self.store.set(f"phase/{rank}", json.dumps(state))
            self.store.add("changes", 1)
        end_later(self.timeout_s)
        self.answers += 1

    def fail(self, reason: str) -> None:
        """Say that the case failed on this rank. The first reason counts; others follow from it."""
        with peers():
            failure = json.dumps([reason, self.job.rank])
            self.store.compare_set(f"failed/{self.case}", "", failure)
            self.store.add("changes", 1)

    def failure(self) -> tuple[str | None, int | None]:
        """Why the case failed, and on which rank; (None, None) if it did not."""
        key = f"failed/{self.case}"
        with peers():
            if not self.store.check([key]):
                return None, None
            reason, rank = json.loads(self.store.get(key))
            return reason, rank

    def stop(self) -> None:
        self.over.set()
        self.thread.join(5)
        faulthandler.cancel_dump_traceback_later()  # last: the thread renews the timer

    def _watch(self) -> None:
        seen, since = -1, time.monotonic()
        while not self.over.wait(self.poll_s):
            try:
                changes = self.watched.add("changes", 0)
                self.answers += 1
                changed = changes != seen
                if changed:
                    seen, since = changes, time.monotonic()
                    # A rank that only waits has no phases of its own. Its timer must not end it
                    # while the job makes progress.
                    end_later(self.timeout_s)
                    if self.watched.check(["hang"]):
                        self._roll_call()
                elif time.monotonic() - since > self.timeout_s:
                    self.watched.set("hang", "")  # all ranks see it at their next poll
                    self.watched.add("changes", 1)
                self._abort_failed(changed)
            except RuntimeError:  # the store is gone: its host has died, or the run is over
                if not self.over.wait(10):
                    end(1, f"{self.where}: the rendezvous store is gone")

    def _listen(self) -> None:
        """End this process if the store stops answering: it is then cut off from the other ranks,
        and no roll call reaches it. While its host is only slow, the store does answer."""
        silent_s, before = 0.0, self.answers
        # counted in waits, not by the clock: this process may have been stopped meanwhile
        while not self.over.wait(LISTEN_S):
            silent_s = silent_s + LISTEN_S if self.answers == before else 0.0
            before = self.answers
            if silent_s >= self.timeout_s + 2 * self.poll_s + CUT_OFF_S:
                host, where = socket.gethostname(), self.where
                faulthandler.dump_traceback(all_threads=True)
                reason = f"HANG: {host} has lost the other ranks: the rendezvous store has not "
                reason += f"answered for {silent_s:g} s; {where}"
                end(HANG, reason, say=self.job.local_rank == 0)

    def _abort_failed(self, changed: bool) -> None:
        """Abort the groups of a case that has failed; at later looks those made meanwhile."""
        case, group = self.case, self.group
        if changed and self.watched.check([f"failed/{case}"]):
            self.failed_case = case
        if group and case == self.case == self.failed_case:
            abort_group(group)

    def _roll_call(self) -> NoReturn:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(frame)).rstrip()
        group, number, text = newest_collective()
        newest = f"newest collective {text}, number {number} of group {group}"
        answer = {"newest": [group, number]}
        self.watched.set(f"answer/{self.job.rank}", json.dumps(answer))
        time.sleep(GRACE_S + self.poll_s)  # the last rank looks so much later than the first
        headline = f"HANG: no progress for {self.timeout_s:g} s"
        reason, silent, with_stack = headline, [], []
        if self.watched.add("speaker", 1) == 1:
            places = ranks_by_fate(self._states_of_all())
            lines = fates(places)
            reason = f"{headline}; {lines[0]}"
            write("\n".join([headline, *lines]))
            late, waiting = places[LATE], places[WAITS]
            if self.job.world_size > MOST_STACKS:
                late, waiting = late[:MOST_NAMED], waiting[:1]
            with_stack = [state["rank"] for state in late + waiting]
            self.watched.set("said", json.dumps([reason, places[SILENT], with_stack]))
        with contextlib.suppress(RuntimeError):  # no rank ends before one has spoken
            reason, silent, with_stack = json.loads(self.watched.get("said"))
        if self.job.rank in with_stack:
            write(f"{self.where}; {newest}\n{stack}")
        self._end_silent(silent, reason)
        end(HANG, reason, say=False)

    def _end_silent(self, silent: list[State], reason: str) -> None:
        """End the silent ranks of this host, which their launcher started beside this rank.

        Their PIDs and paths come from the store, which any process that reaches it can change.
        """
        for state in silent:
            if state["host"] == socket.gethostname() and self._is_sibling(state["pid"]):
                if is_beside(state["error_file"], os.environ.get("TORCHELASTIC_ERROR_FILE")):
                    tell_torchrun(reason, state["error_file"])
                print_stacks_and_kill(state["pid"])

    def _is_sibling(self, pid: Any) -> bool:
        """Whether this is the PID of a process that this rank's launcher has started."""
        known = self.launcher is not None and isinstance(pid, int)
        return known and launcher_of(pid) == self.launcher

    def _states_of_all(self) -> list[State]:
        """What each rank has last written: its phase, and its answer to the roll call if there is
        one. `newest` is its newest collective as [group, number]."""
        ranks = range(self.job.world_size)
        phases = self.watched.multi_get([f"phase/{rank}" for rank in ranks])
        answers = self.watched.multi_get([f"answer/{rank}" for rank in ranks])
        nothing = b'{"newest": null}'
        pairs = zip(phases, answers, strict=True)
        return [json.loads(phase) | json.loads(answer or nothing) for phase, answer in pairs]

    def _end_on_signals(self) -> None:
        """End in order on Ctrl-C, SIGTERM and SIGHUP, although the main thread may wait in C."""
        # Python runs handlers in the main thread only. The pipe wakes a thread of ours at once.
        read, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup ignores it
            ends.remove(signal.SIGHUP)
        for number in ends:
            signal.signal(number, lambda *_: None)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks end with it, however it ends
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        def wait() -> None:
            number = first_of(read, ends)
            path = self.report.path
            count = len(self.report.cases)
            cases = "1 case is" if count == 1 else f"{count} cases are"
            line = f"{signal.Signals(number).name}: {cases} measured"
            line += f" and in {path}; go on with --resume" if path not in (None, "-") else ""
            end(128 + number, line, say=self.job.rank == 0)

        threading.Thread(target=wait, name="signals", daemon=True).start()


def first_of(pipe: int, numbers: Collection[int]) -> int:
    """Wait for one of these signals. Of several at once the lowest number counts.

    pipe: the end of the wakeup pipe to read, which gets a byte for each signal. torchrun sends its
    ranks SIGINT and SIGTERM within a millisecond of a second Ctrl-C. If both are pending, the
    kernel runs the handler of SIGTERM first, so that its byte comes first.
    """
    came: set[int] = set()
    while not came:
        came.update(set(os.read(pipe, 4096)) & set(numbers))
    time.sleep(TOGETHER_S)
    if select.select([pipe], [], [], 0)[0]:
        came.update(set(os.read(pipe, 4096)) & set(numbers))
    return min(came)


def end_later(timeout_s: float) -> None:
    """Restart the timer of the last resort, which prints all stacks and ends this process.

    It expires some time after a hang would have been reported. The timer runs in C: it needs
    neither Python nor the store. Each phase restarts it, and so does the progress of other ranks.
    """
    faulthandler.dump_traceback_later(timeout_s * 1.5 + 20, exit=True)


def launcher_of(pid: int) -> int | None:
    """The PID of the process that started a rank: torchrun's agent, slurmstepd, a shell.

    A wrapper that runs between the launcher and the rank is skipped: it has the rank's variables
    in its environment. None if no such process is visible here, as in a PID namespace of its own.
    """
    of_a_rank = "TORCHELASTIC_RUN_ID" if "TORCHELASTIC_RUN_ID" in os.environ else "RANK"
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        parent = psutil.Process(pid).parent()
        with contextlib.suppress(psutil.AccessDenied):  # of another user, so it is no wrapper
            while parent and of_a_rank in parent.environ():
                parent = parent.parent()
        return parent.pid if parent else None
    return None


def is_beside(path: Any, own: str | None) -> bool:
    """Whether a path is that of another rank's error file: torchrun's FOLDER/LOCAL_RANK/error.json.

    own: the path of this rank's error file; None if torchrun did not start this rank.
    """
    if not isinstance(path, str) or not own:
        return False
    given, mine = Path(path).resolve(), Path(own).resolve()
    same_folder = given.parent.parent == mine.parent.parent
    return same_folder and given.name == mine.name and given.parent.name.isdigit()


def print_stacks_and_kill(pid: int) -> None:
    """Let a silent process on this host print its stacks, and kill it."""
    with contextlib.suppress(OSError):  # another rank was faster
        os.kill(pid, signal.SIGUSR2)  # faulthandler prints its stacks
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)


def ranks_by_fate(states: list[State]) -> dict[str, list[State]]:
    """The last known state of each rank -> those that do not answer, did not arrive, wait.

    A rank did not arrive if another rank is ahead of it, in the phases of the case or in the
    collectives of a group. Nobody waits for a rank outside the case, which stays in phase 0.
    """
    answered = [state for state in states if state["newest"]]
    furthest_phase = max(state["order"] for state in answered)
    last_number: dict[str, int] = {}  # of the collectives of each group
    for state in answered:
        group, number = state["newest"]
        last_number[group] = max(number, last_number.get(group, number))
    places: dict[str, list[State]] = {SILENT: [], LATE: [], WAITS: []}
    for state in states:
        fate = SILENT
        if state["newest"]:
            group, number = state["newest"]
            behind = state["order"] < furthest_phase or number < last_number[group]
            fate = LATE if behind and state["order"][1] != 0 else WAITS
        places[fate].append(state)
    return places


def fates(places: dict[str, list[State]]) -> list[str]:
    """What `ranks_by_fate` returned -> a line for each rank. Long lists are cut and counted."""
    lines: list[str] = []
    for fate, states in places.items():
        lines += [f"{state['where']}: {fate}" for state in states[:MOST_NAMED]]
        if len(states) > MOST_NAMED:
            lines.append(f"and {len(states) - MOST_NAMED:,} more ranks: {fate}")
    return lines


def newest_collective() -> tuple[str, int, str]:
    """The collective that this rank called last, according to torch's flight recorder: its group,
    its number within the group (from 1, 0 if there is none), and what it is."""
    entries = recorded_collectives()
    if not entries:
        return "none", 0, "none so far"
    newest = max(entries, key=lambda entry: entry["time_created_ns"])
    text = f"{newest['profiling_name']} of {newest.get('input_sizes')}"
    return newest["process_group"][0], newest.get("collective_seq_id") or 0, text


def recorded_collectives() -> list[dict[str, Any]]:
    """The entries of this rank's flight recorder, of every backend. Private, in
    torch/csrc/distributed/c10d; seen to work with torch 2.11, 2.14 and 2.15."""
    c10d = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = []
    dumps: list[tuple[str, dict[str, str]]] = [
        ("_dump_fr_trace_json", {}),  # of gloo
        ("_dump_nccl_trace_json", {}),  # of NCCL
        ("_dump_fr_trace_json", {"backend": "nccl2"}),  # of nccl2
    ]
    for name, options in dumps:
        with contextlib.suppress(Exception):  # this torch may lack it
            entries += json.loads(getattr(c10d, name)(**options))["entries"]
    return entries
