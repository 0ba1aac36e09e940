"""Several benchmark commands at once, of which only one runs at a time: `ab.py --interleave`.

Two runs one after the other see two different moments of a shared machine. Two that take turns,
a block of iterations each, see the same one. ab.py starts the commands with a variable that names
a socket; rank 0 of each waits there for its turn, and passes it on before its next block. The other
ranks wait in the barrier that begins the block. Whoever has the turn keeps it while it sets up a
case, gathers, or ends. The first turn begins when all the commands have started up, and a case
begins when all have come to one: the n-th block of a case has those of the others for neighbours.

Linux only: the sockets have abstract names, so that no file is left behind. Imports no torch.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType

VARIABLE = "TORCHRUN_BENCH_TURN"  # of a command's environment: the name of its socket
SHORTEST_S = 0.03  # a turn is kept for so long: what it costs to pass it on stays small


class Turn:
    """A command's place among those that take turns; on its rank 0."""

    def __init__(self, name: str, alive: Callable[[], None], every_s: float) -> None:
        """Waits for the first turn.

        name: the value of VARIABLE. alive: called every `every_s` seconds of waiting, to say that
        this is no hang. Raises ConnectionError where nobody hands out turns.
        """
        self._alive = alive
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(every_s)
        try:
            self._socket.connect("\0" + name)
        except OSError as error:
            raise ConnectionError(
                f"{VARIABLE}={name}: nobody hands out turns there ({error.strerror}); "
                "it is set by ab.py --interleave, unset it for a run by itself"
            ) from None
        self._wait()

    def pass_on(self) -> None:
        """Let the others have their turns, and come back with the next one.

        Raises ConnectionError where ab.py is gone.
        """
        if monotonic() - self._since >= SHORTEST_S:
            self._ask(b".")

    def meet(self) -> None:
        """As pass_on, but come back only when all the others wait for that as well, or are over."""
        self._ask(b"|")

    def close(self) -> None:
        self._socket.close()

    def _ask(self, word: bytes) -> None:
        try:
            self._socket.sendall(word)
        except OSError:
            raise ConnectionError("ab.py, which hands out the turns, is gone") from None
        self._wait()

    def _wait(self) -> None:
        while True:
            try:
                word = self._socket.recv(1)
            except TimeoutError:
                self._alive()
                continue
            except OSError:
                word = b""
            if not word:
                raise ConnectionError("ab.py, which hands out the turns, is gone")
            self._since = monotonic()
            return


class Turns:
    """Hands out the turns, in a thread. Use it as a context manager around the commands.

    `taken` counts each command's turns; 0 where it never asked for one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """names: the commands', in the order of their first turns."""
        self.taken = dict.fromkeys(names, 0)
        self._order = list(names)
        self._waiting: dict[str, socket.socket] = {}
        self._meeting: set[str] = set()  # of those that wait
        self._over: set[str] = set()
        self._holder: str | None = None
        self._next = 0
        self._lock = threading.Lock()  # of all the above
        key = secrets.token_hex(8)
        self._addresses = {name: f"torchrun-bench-{key}-{i}" for i, name in enumerate(names)}
        self._selector = selectors.DefaultSelector()
        self._wake, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="turns", daemon=True)

    def variables(self, name: str) -> dict[str, str]:
        """What a command needs in its environment."""
        return {VARIABLE: self._addresses[name]}

    def over(self, name: str) -> None:
        """Say that all of a command has ended: its turn goes to the next one."""
        with self._lock:
            self._over.add(name)
            self._waiting.pop(name, None)
            self._meeting.discard(name)
            if self._holder == name:
                self._holder = None
            self._hand_out()

    def __enter__(self) -> "Turns":
        for name, address in self._addresses.items():
            listening = socket.socket(socket.AF_UNIX)
            listening.bind("\0" + address)
            listening.listen()
            self._selector.register(listening, selectors.EVENT_READ, name)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _serve(self) -> None:
        listening = {key.fileobj for key in self._selector.get_map().values()}
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._wake:
                    return
                if source in listening:
                    source = source.accept()[0]
                    self._selector.register(source, selectors.EVENT_READ, key.data)
                    self._asks(key.data, source, b"")
                elif word := _read(source):
                    self._asks(key.data, source, word)
                else:  # this connection has ended; the command may open another one
                    self._selector.unregister(source)
                    source.close()
                    with self._lock:
                        if self._waiting.get(key.data) is source:
                            del self._waiting[key.data]
                            self._meeting.discard(key.data)

    def _asks(self, name: str, source: socket.socket, word: bytes) -> None:
        with self._lock:
            self._waiting[name] = source
            if word == b"|":
                self._meeting.add(name)
            if self._holder == name:
                self._holder = None
                self._next = (self._order.index(name) + 1) % len(self._order)
            self._hand_out()

    def _hand_out(self) -> None:
        """Give the turn to the next command, once all that have not ended wait for it."""
        left = [name for name in self._order if name not in self._over]
        if self._holder is not None or not left or not all(name in self._waiting for name in left):
            return
        if self._meeting.issuperset(left):
            self._meeting.clear()
            self._next = 0
        order = self._order[self._next :] + self._order[: self._next]
        self._holder = next(name for name in order if name in left and name not in self._meeting)
        self.taken[self._holder] += 1
        with contextlib.suppress(OSError):  # it ends just now, which `over` will say
            self._waiting.pop(self._holder).sendall(b"!")


def _read(source: socket.socket) -> bytes:
    try:
        return source.recv(1)
    except OSError:
        return b""


def taken_here() -> bool:
    """Whether this process's command takes turns with others."""
    return VARIABLE in os.environ


def join(alive: Callable[[], None], every_s: float) -> Turn | None:
    """This command's place among others, where it was started with some; waits for its turn."""
    return Turn(os.environ[VARIABLE], alive, every_s) if taken_here() else None
