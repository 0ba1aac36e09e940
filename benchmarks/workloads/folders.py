"""Folders of a run that are removed however it ends, also by SIGKILL."""

import subprocess

# Its stdin closes when the process that started it ends, in whichever way, and then `cat` ends.
# Other ranks may still write at that time, so it tries up to three times.
REMOVE = 'exec >/dev/null 2>&1; cat; for i in 1 2 3; do rm -rf -- "$1" && exit; sleep 1; done'
REMOVERS: list[subprocess.Popen[bytes]] = []  # so that nothing closes their stdin before


def remove_at_end(folder: str) -> None:
    """Start a shell that removes the folder when this process has ended. It has a session of its
    own: Ctrl-C and a kill of the job's processes leave it alive."""
    command = ["sh", "-c", REMOVE, "sh", folder]
    REMOVERS.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
