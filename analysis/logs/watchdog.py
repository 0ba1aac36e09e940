"""Read what torch, NCCL, torchrun and these scripts print about a hang, and flight recorder dumps.

The forms of the lines are those of torch 2.6 to 2.15: ProcessGroupNCCL.cpp (watchdog, heartbeat
monitor), TraceUtils.h (desync report), ProcessGroupGloo.cpp (monitored barrier),
ProcessGroupWrapper.cpp (TORCH_DISTRIBUTED_DEBUG=DETAIL) and elastic/multiprocessing/errors.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNKNOWN = "a collective"  # the operation in a line that does not name it
LONGEST_LINE = 20_000  # characters of a line that are searched
OP_TYPES = {  # torch's names in WorkNCCL(...) -> functions of torch.distributed
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
# sends, receives and batches of them: their numbers differ between ranks, so they are not compared
UNMATCHED = {"SEND", "RECV", "RECVANYSOURCE", "COALESCED"}
# operations in which each rank must pass the same number of elements
EVEN = {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"}
COLORS = re.compile(r"\x1b\[[0-9;]*m")
GLOBAL_RANK = re.compile(r"\[rank(\d+)\]:")
GROUP = re.compile(
    r"\[PG (?:ID \d+ PG )?(?:GUID )?(?P<group>[^\s()\]]+) ?(?:\((?P<name>[^)]*)\))? "
    r"Rank (?P<rank>\d+)\]"
)
WORK = re.compile(r"WorkNCCL\(SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+), NumelIn=(?P<numel>\d+)")
STATUS = re.compile(
    r"work(?: sequence id)?: (?P<seq>-?\d+),? (?:PG status: )?last enqueued (?:NCCL )?work: "
    r"(?P<enqueued>-?\d+)(?:, last started work: -?\d+ \([^)]*\))?, last completed (?:NCCL )?work: "
    r"(?P<completed>-?\d+)"
)
DUMP_SIGNAL = re.compile(
    r"Received a dump signal.*?Last enqueued NCCL work: (?P<enqueued>-?\d+), "
    r"last completed NCCL work: (?P<completed>-?\d+)"
)
DESYNC = re.compile(
    r"\[(?P<ranks>[\d, ]+)\] (?:joined but didn't finish|finished collective #\d+, but didn't join)"
    r" collective #(?P<seq>\d+)"
)
BARRIER = re.compile(
    r"(?:\[Rank (?P<own>\d+)\]: )?Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier"
)
FINGERPRINT = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\("
    r"SequenceNumber=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[^\]]*)\])?"
    r"(?:, TensorDtypes=(?P<types>[\w, ]*), TensorDeviceTypes)?"
)
WRONG_SIZE = re.compile(r"Received data size doesn't match expected size")
GLOO_TIMEOUT = re.compile(r"Timed out waiting \d+ms for (?:send|recv) operation to complete")
PEER_LOST = re.compile(
    r"^(?!.*\bretry)(?:.*Connection (?:closed|reset) by (?:remote )?peer|"
    r".*NCCL WARN .*(?:timed? ?out|closed))"
)
# torchrun's agent: a process of its node ended, which ends the attempt
ENDED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: |will restart worker group")
OWN = re.compile(
    r"(?:^|[\s:]) *(?P<who>rank \d+ on [^,]+), .*: "
    r"(?P<state>does not answer|is behind the other ranks|waits)\b"
)
# torchrun's summary: a block for each failed rank, the one that failed first at the end
SUMMARY = re.compile(r"(?:^|\s)  (?=.{10}: )(?P<name>time|host|rank|exitcode) *: (?P<value>.*)$")
TASK = re.compile(r"^ *(\d+): ")  # of srun -l


def task_of(line: str) -> str:
    """Return the prefix of `srun -l`, or an empty text."""
    match = TASK.match(line)
    return match[0] if match else ""


class Call(NamedTuple):
    """A collective on one rank."""

    seq: int
    op: str
    numel: int  # elements of the input; -1 if unknown

    @property
    def signature(self) -> tuple[str, int]:
        """What all ranks must agree on."""
        return self.op, self.numel if self.op in EVEN else -1

    def __str__(self) -> str:
        size = f" of {self.numel:,} elements" if self.numel >= 0 else ""
        return f"{self.op}{size}"


@dataclass
class State:
    """Where one rank is in one group, as far as its lines say."""

    enqueued: int = -1
    completed: int = -1
    call: Call | None = None  # the collective in which it waits
    calls: dict[int, Call] = field(default_factory=dict)  # those in its dump, by number
    attempt: int = 0  # the number of ends of attempts before its timeout


@dataclass
class Exit:
    """A failed rank in torchrun's summary."""

    rank: int = -1
    host: str = ""
    status: int = 0
    time: str = ""  # in ISO format, seconds
    is_root: bool = False  # the first failure on its node


@dataclass
class Evidence:
    """All that the files say. Ranks are global ranks."""

    states: dict[str, dict[int, State]] = field(default_factory=dict)  # by group and rank
    members: dict[str, set[int]] = field(default_factory=dict)  # of groups, where known
    names: dict[str, str] = field(default_factory=dict)  # group -> description
    seen: set[int] = field(default_factory=set)  # ranks that printed any line
    waiting: set[int] = field(default_factory=set)  # ranks whose gloo operation timed out
    missing: set[int] = field(default_factory=set)  # ranks that a monitored barrier missed
    # rank -> its call and the types of its tensors, as that rank and as other ranks print it
    fingerprints: dict[int, tuple[str, str]] = field(default_factory=dict)
    of_peers: dict[int, tuple[str, str]] = field(default_factory=dict)
    in_group: set[str] = field(default_factory=set)  # messages that count ranks within a group
    unmatched: set[int] = field(default_factory=set)  # ranks that wait in a send or receive
    wrong_size: bool = False  # gloo received a message of another size than it expected
    own: dict[str, list[str]] = field(default_factory=dict)  # state -> ranks of a HANG message
    exits: list[Exit] = field(default_factory=list)
    lost: dict[int | None, str] = field(default_factory=dict)  # rank -> line about a connection
    unnumbered: set[str] = field(default_factory=set)  # groups whose ranks have no global number
    pending: dict[int, list[Call]] = field(default_factory=dict)  # timed out, group not yet known
    ends: int = 0  # number of lines that end an attempt
    cut_off: list[str] = field(default_factory=list)  # files whose last line is incomplete
    open_ended: list[str] = field(default_factory=list)  # those of several ranks without a summary
    with_file: set[int] = field(default_factory=set)  # ranks with a file of their own

    def state(self, group: str, rank: int) -> State:
        """Return the state of a rank in a group, which may be changed."""
        return self.states.setdefault(group, {}).setdefault(rank, State())

    def merge(self, other: "Evidence") -> None:
        """Add what another file says, of which only the last attempt counts."""
        for group, states in other.states.items():
            for rank, state in states.items():
                mine = self.state(group, rank)
                mine.enqueued = max(mine.enqueued, state.enqueued)
                mine.completed = max(mine.completed, state.completed)
                mine.call = mine.call or state.call
                mine.calls |= state.calls
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if name == "members":
                for group, ranks in value.items():
                    self.members.setdefault(group, set()).update(ranks)
            elif name == "own":
                for state, ranks in value.items():
                    self.own.setdefault(state, []).extend(ranks)
            elif isinstance(value, list):
                mine.extend(value)
            elif isinstance(value, (dict, set)) and name != "states":
                mine.update(value)
        self.wrong_size |= other.wrong_size
        self.ends += other.ends

    def add_lines(self, lines: Iterable[str]) -> None:
        """Read the lines of a log: one rank's, one node's or the whole job's. The tasks of srun -l
        take turns line by line."""
        for _, of_task in itertools.groupby(sorted(lines, key=task_of), task_of):
            own = Evidence()
            own.add_stream(of_task)
            self.merge(own)

    def add_stream(self, lines: Iterable[str]) -> None:
        """Read lines in the order in which they were printed."""
        in_hang, is_root = False, None
        for raw in lines:
            whole = COLORS.sub("", raw[:LONGEST_LINE]).rstrip()
            in_hang = ("HANG: " in whole) or (in_hang and bool(OWN.search(whole)))
            self.ends += bool(ENDED.search(whole))
            if in_hang and (match := OWN.search(whole)):
                self.own.setdefault(match["state"], []).append(match["who"])
                continue
            if "Root Cause (first observed failure)" in whole:
                is_root = True
            elif whole.endswith("Failures:"):
                is_root = False
            elif is_root is not None and (match := SUMMARY.search(whole)):
                self._add_summary(match["name"], match["value"], is_root)
            else:
                # two ranks may have written into one line
                for line in re.split(r"(?=\[rank\d+\]:)", whole):
                    prefix = GLOBAL_RANK.match(line)
                    rank = int(prefix[1]) if prefix else None
                    if rank is not None:
                        self.seen.add(rank)
                    self._add_line(line, rank)

    def _add_summary(self, name: str, value: str, is_root: bool) -> None:
        """Read a line of a block of torchrun's summary."""
        if name == "time":
            self.exits.append(Exit(time=value.strip(), is_root=is_root))
        if not self.exits:
            return
        block = self.exits[-1]
        number = re.match(r"-?\d+", value)
        if name == "host":
            block.host = value.strip()
        elif name == "rank" and number:
            block.rank = int(number[0])
            self.seen.add(block.rank)
        elif name == "exitcode" and number:
            block.status = int(number[0])

    def _add_line(self, line: str, rank: int | None) -> None:
        if "NCCL work" in line or "watchdog" in line or "WorkNCCL" in line:
            self._add_watchdog(line, rank)
        elif match := DESYNC.search(line):
            self._add_desync(match)
        elif match := BARRIER.search(line):
            if rank is not None and match["own"] and int(match["own"]) != rank:
                self.in_group.add(line.partition(": ")[2].strip())
            else:
                self.missing |= {int(word) for word in match["ranks"].split(",") if word.strip()}
        elif "is running collective" in line:
            for number, match in enumerate(FINGERPRINT.finditer(line)):
                op, shape = OP_TYPES.get(match["op"], match["op"].lower()), match["shape"]
                call = f"{op} {match['seq']}" + (f" of shape [{shape}]" if shape else "")
                printed = call, match["types"] or ""
                if number:
                    self.of_peers[int(match["rank"])] = printed
                else:
                    self.fingerprints[int(match["rank"]) if rank is None else rank] = printed
                    if rank is not None and int(match["rank"]) != rank:
                        self.in_group.add(line.partition(": ")[2].strip())
        elif WRONG_SIZE.search(line):
            self.wrong_size = True
        elif GLOO_TIMEOUT.search(line) and rank is not None:
            self.waiting.add(rank)
        elif PEER_LOST.search(line):
            self.lost.setdefault(rank, line.strip())

    def _add_watchdog(self, line: str, rank: int | None) -> None:
        """Read a line of the watchdog. `[rank5]:` is the global rank, `Rank 1` the group's."""
        where, work = GROUP.search(line), WORK.search(line)
        status = STATUS.search(line) or DUMP_SIGNAL.search(line)
        if rank is None and where:
            rank = int(where["rank"])
            if where["group"] != "0":
                self.unnumbered.add(where["group"])
        if rank is None:
            own_rank = re.search(r"\[Rank (\d+)\]", line)
            rank = int(own_rank[1]) if own_rank else None
        if rank is None:
            return
        self.seen.add(rank)
        if work and "caught collective operation timeout" in line:
            if work["op"] in UNMATCHED:
                self.unmatched.add(rank)
                return
            op = OP_TYPES.get(work["op"], work["op"].strip("_").lower())
            call = Call(int(work["seq"]), op, int(work["numel"]))
            if where:
                self._waits(where["group"], rank, call)
            else:
                self.pending.setdefault(rank, []).append(call)
        if where and where["name"]:
            self.names[where["group"]] = where["name"]
        if where and status:
            if status.re is STATUS:
                for call in self.pending.get(rank, []):
                    if call.seq == int(status["seq"]):
                        self._waits(where["group"], rank, call)
            state = self.state(where["group"], rank)
            state.enqueued = max(state.enqueued, int(status["enqueued"]))
            state.completed = max(state.completed, int(status["completed"]))

    def _waits(self, group: str, rank: int, call: Call) -> None:
        """Note that a call of a rank timed out, which happens once per attempt. If another one did
        earlier, the job was restarted, and what the log says so far is past; but a call that had
        been enqueued at that time may time out in the same attempt."""
        state = self.state(group, rank)
        earlier = state.call
        if earlier and call.seq == earlier.seq:
            return
        if earlier and earlier.seq < call.seq <= state.enqueued and state.attempt == self.ends:
            return
        if earlier:
            fresh = Evidence(seen=self.seen, names=self.names, ends=self.ends)
            vars(self).update(vars(fresh))
            state = self.state(group, rank)
        state.call, state.attempt = call, self.ends

    def _add_desync(self, match: re.Match[str]) -> None:
        """Read a line of the report that TORCH_NCCL_DESYNC_DEBUG=1 adds, of the default group."""
        seq = int(match["seq"])
        joined = "joined but" in match[0]
        for word in match["ranks"].split(","):
            rank = int(word)
            state = self.state("0", rank)
            self.members.setdefault("0", set()).add(rank)
            self.seen.add(rank)
            state.enqueued = max(state.enqueued, seq if joined else seq - 1)
            state.completed = max(state.completed, seq - 1)
            if joined and state.call is None:
                state.call = Call(seq, UNKNOWN, -1)

    def add_dump(self, content: Mapping[str, Any], rank: int) -> None:
        """Read a dump of the flight recorder of one rank. Raises KeyError, TypeError or ValueError
        if it is damaged."""
        self.seen.add(rank)
        for name, config in dict(content.get("pg_config") or {}).items():
            self.members.setdefault(str(name) or "0", set()).update(json.loads(config["ranks"]))
        for entry in content["entries"]:
            if entry.get("is_p2p"):
                continue
            group, label = map(str, entry["process_group"])
            seq = int(entry["collective_seq_id"])
            state = self.state(group, rank)
            self.names.setdefault(group, label)
            state.enqueued = max(state.enqueued, seq)
            op = entry["profiling_name"].rpartition(":")[2].partition(" ")[0]
            numel = sum(math.prod(shape) for shape in entry["input_sizes"])
            call = state.calls[seq] = Call(seq, OP_TYPES.get(op, op), numel)
            if entry.get("retired") or entry["state"] == "completed":
                state.completed = max(state.completed, seq)
            elif state.call is None or seq < state.call.seq:
                state.call = call
