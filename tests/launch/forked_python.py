"""A python3 whose processes come from one that has torch imported already, by fork.

64 ranks that each import a CUDA build of torch take 25 GB, because the loader writes to some 300 MB
of its libraries in every process (seen with 2.15.0+cu132). Forked ranks share these pages. They run
the script as `python3 SCRIPT` does, with the standard streams, the environment and the folder of
the process that stands for them.

    python forked_python.py serve SOCKET               one for each node
    python -S forked_python.py run SOCKET SCRIPT ...   in the place of python3
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def serve(path: str) -> NoReturn:
    import torchvision  # noqa: F401 - and torch

    gc.freeze()  # so that collecting does not write to what is shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the wardens
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                guard(connection)
            connection.close()


def guard(connection: socket.socket) -> NoReturn:
    """Start the rank that a client asks for; signals go to it, its status to the client.

    It ends when the client does.
    """
    data, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
    size, _, text = data.partition(b"\n")
    while len(text) < int(size):
        text += connection.recv(2**20)
    rank = os.fork()
    if rank == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        run_script(**json.loads(text))
    with contextlib.suppress(OSError):
        ended = os.pidfd_open(rank)
        while ended not in select.select([ended, connection], [], [])[0]:
            number = connection.recv(1)
            os.kill(rank, number[0] if number else signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(bytes([status if status >= 0 else 128 - status]))
    os._exit(0)


def run_script(argv: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(path: str, argv: list[str]) -> int:
    request = {"argv": argv, "environment": dict(os.environ), "folder": str(Path.cwd())}
    message = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        for number in PASSED_ON:
            signal.signal(number, lambda number, frame: connection.send(bytes([number])) and None)
        start = f"{len(message)}\n".encode()
        sent = socket.send_fds(connection, [start + message], [0, 1, 2])
        connection.sendall((start + message)[sent:])
        status = connection.recv(1)
        return status[0] if status else 1


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(run(sys.argv[2], sys.argv[3:]))
