"""Folders that are removed when a run ends, even if it is killed."""

import subprocess

# `cat` ends when its stdin closes, which happens when the process that started it ends, even by
# SIGKILL. Other ranks may still be writing at that time, so the shell tries up to three times.
REMOVE = 'exec >/dev/null 2>&1; cat; for i in 1 2 3; do rm -rf -- "$1" && exit; sleep 1; done'
REMOVERS: list[subprocess.Popen[bytes]] = []  # referenced, so that their stdin stays open


def remove_at_end(folder: str) -> None:
    """Start a shell that removes a folder when this process has ended. It runs in a new session, so
    that Ctrl-C and a kill of the job's processes do not end it."""
    command = ["sh", "-c", REMOVE, "sh", folder]
    REMOVERS.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
