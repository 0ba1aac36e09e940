"""Who hangs, and where; who failed; an orderly end on a signal. Examples: docs/reliability.md.

Each rank leaves in the store what it does (its phase), between timed blocks and never inside one.
A thread of each looks there, twice a second in a small job:

- No rank has changed its phase for `timeout` seconds: a hang, and a roll call of these threads. Who
  does not answer is stopped, dead or out of reach; who does and is behind others did not arrive.
- A rank of the case has failed: the group is aborted here as well, or this rank would wait for ever
  in a collective that the other one has left.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from common.cli import HANG, end, write
from common.dist import Group, Job, abort_group, peers
from common.report import Report

GRACE_S = 2.0  # for the answers to a roll call
FATES = ("does not answer (stopped, dead or out of reach)", "did not arrive", "waits")


class Watchdog:
    """Start it once the ranks have met; `stop` it before the process leaves the job."""

    def __init__(self, job: Job, timeout_s: float, report: Report) -> None:
        self.job, self.timeout_s, self.report = job, timeout_s, report
        self.store = dist.PrefixStore("watchdog", job.store)  # the main thread's
        self.other = dist.PrefixStore("watchdog", job.store.clone())  # the watching thread's
        self.over, self.case = threading.Event(), 0
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        self.store.set(f"answer/{job.rank}", "")
        self.begin("start")
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        self._end_on_signals()

    def begin(self, label: str, member: bool = True) -> None:
        """A new case; ranks outside it wait, and are never behind its ranks."""
        self.label, self.case = label, self.case + 1
        self.group: Group | None = None  # is aborted when a rank of the case fails
        self.order = 0 if member else -1  # the phase of ranks outside the case is number 0
        self.phase("set up" if member else "not part of it")

    def phase(self, what: str, ahead: int = 1) -> None:
        """Say what comes next. It calls the store: keep it out of timed code.

        ahead: 0 for what this rank alone does, which puts the others behind nobody.
        """
        self.order += ahead
        host = socket.gethostname()
        self.where = f"rank {self.job.rank} on {host}, case '{self.label}', {what}"
        order = [self.case, self.order]
        now = {"where": self.where, "order": order, "host": host, "pid": os.getpid()}
        with peers():
            self.store.set(f"phase/{self.job.rank}", json.dumps(now))
            self.store.add("changes", 1)
        # the last resort, in C: it needs neither Python nor the store
        faulthandler.dump_traceback_later(self.timeout_s * 1.5 + 20, exit=True)

    def fail(self, reason: str) -> None:
        """This rank's case failed. The first reason counts: the others follow from it."""
        with peers():
            self.store.compare_set(f"failed/{self.case}", "", reason)
            self.store.add("changes", 1)

    def reason(self) -> str | None:
        """Why the case failed, on any rank; None if it did not."""
        key = f"failed/{self.case}"
        with peers():
            return self.store.get(key).decode() if self.store.check([key]) else None

    def stop(self) -> None:
        self.over.set()
        faulthandler.cancel_dump_traceback_later()
        self.thread.join(5)

    def _watch(self) -> None:
        poll_s = max(0.5, self.job.world_size / 200)  # a few hundred calls a second in all
        seen, since = -1, time.monotonic()
        while not self.over.wait(poll_s):
            try:
                changes = self.other.add("changes", 0)
                if changes == seen:
                    if time.monotonic() - since > self.timeout_s:
                        self.other.set("hang", "")  # all see it at their next poll, this one too
                        self.other.add("changes", 1)
                    continue
                seen, since = changes, time.monotonic()
                if self.other.check(["hang"]):
                    self._roll_call()
                self._abort_failed()
            except RuntimeError:  # the store is gone: its host has died, or the run is over
                if not self.over.wait(10):
                    end(1, f"{self.where}: the rendezvous store is gone")

    def _abort_failed(self) -> None:
        group, case = self.group, self.case
        if group and self.other.check([f"failed/{case}"]):
            abort_group(group)
            if self.group is group:  # else the next case has begun meanwhile
                self.group = None

    def _roll_call(self) -> NoReturn:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(frame)).rstrip()
        group, number, text = newest_collective()
        write(f"{self.where}; newest collective {text}, number {number} of group {group}\n{stack}")
        self.other.set(f"answer/{self.job.rank}", json.dumps([group, number]))
        time.sleep(GRACE_S)
        ranks = range(self.job.world_size)
        states = [json.loads(x) for x in self.other.multi_get([f"phase/{r}" for r in ranks])]
        answers = self.other.multi_get([f"answer/{r}" for r in ranks])
        for state, answer in zip(states, answers, strict=True):
            state["newest"] = json.loads(answer) if answer else None  # it is silent
        if self.other.add("speaker", 1) == 1:
            write(f"HANG: no progress for {self.timeout_s:g} s\n{fates(states)}")
            self.other.set("said", "")
        with contextlib.suppress(RuntimeError):  # nobody ends before it has been said
            self.other.wait(["said"])
        silent = [s["pid"] for s in states if not s["newest"] and s["host"] == socket.gethostname()]
        for pid in silent:
            with contextlib.suppress(OSError):  # a neighbour was faster
                os.kill(pid, signal.SIGUSR2)  # faulthandler prints its stacks
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
        end(HANG)

    def _end_on_signals(self) -> None:
        """End in order on Ctrl-C, SIGTERM and SIGHUP although the main thread may wait in C."""
        # Python runs a handler in the main thread only; the pipe tells a thread of ours at once
        read, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
            ends.remove(signal.SIGHUP)
        for number in ends:
            signal.signal(number, lambda *_: None)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks end with it, however it ends
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

        def wait() -> None:
            while (number := os.read(read, 1)[0]) not in ends:
                pass
            path = self.report.path
            line = f"{signal.Signals(number).name}: {len(self.report.cases)} cases are measured"
            line += f" and in {path}; go on with --resume" if path else ""
            end(128 + number, line if self.job.rank == 0 else "")

        threading.Thread(target=wait, name="signals", daemon=True).start()


def fates(states: list[dict[str, Any]]) -> str:
    """What each rank has last said -> a line for each: does not answer, did not arrive, or waits.

    Who is behind another one did not arrive: in the case's phases, or in a group's collectives.
    """
    answered = [s for s in states if s["newest"]]
    furthest = max(s["order"] for s in answered)
    numbers = dict(sorted(s["newest"] for s in answered))  # of each group the highest

    def fate(s: dict[str, Any]) -> int:
        if not s["newest"]:
            return 0
        group, number = s["newest"]
        late = s["order"] < furthest or number < numbers[group]
        return 1 if late and s["order"][1] else 2

    lines = sorted((fate(s), s["where"]) for s in states)
    return "\n".join(f"{where}: {FATES[number]}" for number, where in lines)


def newest_collective() -> tuple[str, int, str]:
    """Of this rank, as torch's flight recorder has it: its group, its number there, what it is."""
    entries: list[dict[str, Any]] = []
    name = "_dump_fr_trace_json"  # gloo's, and of torch 2.15's NCCL
    for dump, of in (name, {}), ("_dump_nccl_trace_json", {}), (name, {"backend": "nccl2"}):
        with contextlib.suppress(Exception):  # private interfaces, and the run is over anyway
            entries += json.loads(getattr(torch._C._distributed_c10d, dump)(**of))["entries"]
    if not entries:
        return "none", 0, "none so far"
    e = max(entries, key=lambda e: e["time_created_ns"])
    text = f"{e['profiling_name']} of {e.get('input_sizes')}"
    return e["process_group"][0], e.get("collective_seq_id") or 0, text
