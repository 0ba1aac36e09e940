"""Who hangs: made of what each rank has last said of itself, and who has answered a roll call.

In the store, under the watchdog's prefix: `phase/RANK` is a rank's state as JSON (rank, host, pid,
started, case, phase, order), `answer/RANK` is there once it has answered.
"""

import json
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]


def state_of(store: Store, rank: int) -> dict[str, Any]:
    """What a rank has last said of itself."""
    if not store.check([f"phase/{rank}"]):
        return {"rank": rank, "host": "?", "case": "start", "phase": "", "order": [0, 0]}
    state: dict[str, Any] = json.loads(store.get(f"phase/{rank}"))
    return state


def publish_verdict(store: Store, world_size: int, seconds: int) -> None:
    """Put into the store who hangs, for all ranks to read; who speaks; whom to end on each host."""
    states = [state_of(store, rank) for rank in range(world_size)]
    here = [store.check([f"answer/{rank}"]) for rank in range(world_size)]
    silent = [state for state, answers in zip(states, here, strict=True) if not answers]
    answering = [state for state, answers in zip(states, here, strict=True) if answers]
    first_of: dict[str, int] = {}
    for state in answering:
        first_of.setdefault(state["host"], state["rank"])
    by_host: dict[str, list[Any]] = {}
    for state in silent:
        if "pid" in state:
            by_host.setdefault(state["host"], []).append([state["pid"], state["started"]])
    for host, processes in by_host.items():
        if host in first_of:  # nobody else can reach them
            store.set(f"end/{first_of[host]}", json.dumps(processes))
    store.set("text", verdict_of(seconds, silent, answering))
    speaker = answering[0]["rank"] if answering else 0
    store.set("verdict", json.dumps({"speaker": speaker, "readers": len(answering)}))


def read_verdict(store: Store, rank: int) -> tuple[str, bool, list[tuple[int, str]]]:
    """What `publish_verdict` says to this rank: the verdict, whether to print it, whom to end.

    The verdict is for rank 0, which writes the report, and for the one that prints it: it grows
    with the ranks.
    """
    store.wait(["verdict"])
    verdict = json.loads(store.get("verdict"))
    speaks = verdict["speaker"] == rank
    text = store.get("text").decode() if speaks or rank == 0 else "HANG"
    silent = json.loads(store.get(f"end/{rank}")) if store.check([f"end/{rank}"]) else []
    if store.add("read", 1) == verdict["readers"]:
        store.set("all read", "")
    return text, speaks, silent


def where(state: dict[str, Any]) -> str:
    return f"in case '{state['case']}', phase '{state['phase']}'"


def silence(state: dict[str, Any]) -> str:
    return (
        f"rank {state['rank']} on {state['host']} does not answer "
        f"(stopped, dead or out of reach); last seen {where(state)}"
    )


def verdict_of(seconds: int, silent: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    lines = [f"HANG: no progress for {seconds} s"]
    for state in silent:
        lines.append(silence(state))
    behind = behind_of(here)
    for state in behind:
        lines.append(f"rank {state['rank']} on {state['host']} did not arrive: {where(state)}")
    late = {state["rank"] for state in behind}
    waiting = [state for state in here if state["rank"] not in late]
    for state in waiting[:64]:
        lines.append(f"rank {state['rank']} on {state['host']} waits {where(state)}")
    return "\n".join(lines)


def behind_of(here: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whom another is ahead of, as far as their orders can be compared.

    It is enough to look at the greatest order: who is not behind that one begins as it does, and
    so nobody is ahead of him.
    """
    last: list[int] = max((state["order"] for state in here), default=[])
    return [state for state in here if state["order"] < last[: len(state["order"])]]
