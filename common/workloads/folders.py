"""Folders of a run that are removed however it ends, also by SIGKILL."""

import subprocess
from collections.abc import Sequence

# Its stdin closes when the process that started it ends, in whichever way, and then `cat` ends.
# Other ranks may still write at that time, so it tries up to three times.
REMOVE = 'exec >/dev/null 2>&1; cat; for i in 1 2 3; do rm -rf -- "$@" && exit; sleep 1; done'


def remove_at_end(folders: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a shell that removes the folders when this process has ended.

    To remove them earlier and wait for that, call `communicate()` of what it returns. The shell has
    a session of its own, so that Ctrl-C and a kill of the job's processes leave it alive.
    """
    command = ["sh", "-c", REMOVE, "sh", *folders]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
