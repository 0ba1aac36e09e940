"""Turns: one command at a time, in order; from the sides of a command and of ab.py."""

import itertools
import threading
import time

import pytest

from common.turns import VARIABLE, Turn, Turns

LIMIT_S = 30.0


class Commands:
    """Threads in place of commands; `log` has the name of each that had a turn, in order."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.log: list[str] = []
        self.running = 0
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, name: str, blocks: int, cases: int = 1, delay: float = 0.0) -> None:
        def work() -> None:
            try:
                time.sleep(delay)
                turn = self.join(name)
                for _ in range(cases):
                    turn.meet()
                    for _ in range(blocks):
                        self.block(name)
                        turn.pass_on()
                turn.close()
                self.turns.over(name)
            except BaseException as error:
                self.errors.append(error)

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def join(self, name: str) -> Turn:
        return Turn(self.turns.variables(name)[VARIABLE], lambda: None, LIMIT_S)

    def block(self, name: str) -> None:
        self.running += 1
        assert self.running == 1, "two at a time"
        self.log.append(name)
        time.sleep(0.04)  # longer than the shortest turn
        assert self.running == 1, "two at a time"
        self.running -= 1

    def finish(self) -> str:
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"no turn came; so far: {self.log}"
        assert not self.errors
        return "".join(self.log)


def test_they_alternate_from_the_first_block() -> None:
    """Although `a` is there long before the other one."""
    with Turns(["b", "a"]) as turns:
        commands = Commands(turns)
        commands.start("a", 3)
        commands.start("b", 3, delay=0.3)
        assert commands.finish() == "bababa"
        assert min(turns.taken.values()) >= 4


def test_who_is_over_is_waited_for_no_more() -> None:
    with Turns(["a", "b", "c"]) as turns:
        commands = Commands(turns)
        for name, blocks in (("a", 1), ("b", 3), ("c", 2)):
            commands.start(name, blocks)
        assert commands.finish() == "abcbcb"


def test_cases_begin_together() -> None:
    """The one with fewer blocks waits for the other's next case."""
    with Turns(["a", "b"]) as turns:
        commands = Commands(turns)
        commands.start("a", 1, cases=3)
        commands.start("b", 3, cases=2)
        assert commands.finish() == "abbbabbba"


def test_a_short_block_keeps_the_turn() -> None:
    with Turns(["a", "b"]) as turns:
        waits = threading.Thread(target=lambda: Commands(turns).join("b"), daemon=True)
        waits.start()
        turn = Commands(turns).join("a")
        for _ in range(5):
            turn.pass_on()
        assert turns.taken == {"a": 1, "b": 0}
        turns.over("a")
        waits.join(LIMIT_S)
        assert turns.taken == {"a": 1, "b": 1}


def test_a_second_connection_goes_on_with_the_turn() -> None:
    """As of the next process of a script that has several, one after the other."""
    with Turns(["a", "b"]) as turns:
        waits = threading.Thread(target=lambda: Commands(turns).join("b"), daemon=True)
        waits.start()
        Commands(turns).join("a").close()
        again = threading.Thread(target=lambda: Commands(turns).join("a"), daemon=True)
        again.start()
        waits.join(LIMIT_S)  # a new connection asks: it is the other's turn
        turns.over("b")
        again.join(LIMIT_S)
        assert not waits.is_alive()
        assert not again.is_alive()


def test_whoever_waits_is_alive() -> None:
    beats = itertools.count()
    with Turns(["a", "b"]) as turns:
        name = turns.variables("a")[VARIABLE]
        waits = threading.Thread(target=lambda: Turn(name, lambda: next(beats), 0.01), daemon=True)
        waits.start()
        limit = time.monotonic() + LIMIT_S
        while next(beats) < 20:  # this counts as well
            assert time.monotonic() < limit
            time.sleep(0.01)
        turns.over("b")
        waits.join(LIMIT_S)
        assert not waits.is_alive()
    assert turns.taken == {"a": 1, "b": 0}


def test_nobody_there() -> None:
    with pytest.raises(ConnectionError, match="TORCHRUN_BENCH_TURN=x: nobody hands out turns"):
        Turn("x", lambda: None, 1.0)
    with Turns(["a"]) as turns:
        turn = Commands(turns).join("a")
    with pytest.raises(ConnectionError, match=r"ab\.py, which hands out the turns, is gone"):
        turn.meet()
