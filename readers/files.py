"""Files that a user names: only regular files are read, up to limits on their number and size, and
only files of this project are replaced."""

import gzip
import io
import os
import pickle
import pickletools
import re
import shlex
import stat
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from harness.files import check_regular, kind_of

GENERATOR = "output of torchrun-bench"  # in the metadata of each page (report.html.j2) and picture
SEARCHED_BYTES = 2**14  # at the start and at the end of a file, to find it
MAX_FILES = 10_000  # in a folder
MAX_FOLDER_BYTES = 2**34  # of the files that are read from a folder, as stored
MAX_FILE_BYTES = 2**32  # of a file, uncompressed
CHUNK_BYTES = 2**20
# First bytes of a compressed file that is not read -> what it is, and a command to decompress it
COMPRESSED = {
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", "zstd -d"),
    b"PK\x03\x04": ("a zip archive", "unzip"),
    b"\xfd7zX": ("a file compressed by xz", "xz -d"),
    b"BZh": ("a file compressed by bzip2", "bzip2 -d"),
}
# The opcodes that all protocols of pickle use for None, bool, int, float, str, bytes, list, tuple
# and dict. All other opcodes create objects, call functions or refer to persistent ids.
PLAIN_OPCODES = {
    *("PROTO", "FRAME", "MARK", "STOP", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GET", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("LIST", "EMPTY_LIST", "APPEND", "APPENDS", "DICT", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def natural(name: str) -> list[str | int]:
    """Return a key that sorts `rank2` before `rank10`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def files_of(folder: str | Path) -> list[Path]:
    """Return what a folder contains except for folders, in natural order of the names. Raises
    ValueError if there are more than MAX_FILES."""
    inside = (path for path in Path(folder).iterdir() if not path.is_dir())
    paths = list(islice(inside, MAX_FILES + 1))
    if len(paths) > MAX_FILES:
        raise ValueError(f"{folder} has more than {MAX_FILES:,} files; name those to read")
    return sorted(paths, key=lambda path: natural(path.name))


def check_total(folder: str | Path, paths: list[Path]) -> None:
    """Raise ValueError if the files of a folder have more than MAX_FOLDER_BYTES in all."""
    total = sum(path.stat().st_size for path in paths)
    if total > MAX_FOLDER_BYTES:
        raise ValueError(
            f"{folder} has {total:,} bytes, more than the limit of {MAX_FOLDER_BYTES:,}; name the "
            "files to read"
        )


def read(path: str | Path) -> bytearray:
    """Return the content of a regular file, decompressed if gzip compressed it. Raises ValueError
    for other kinds, compressions and sizes; OSError, EOFError or zlib.error on failure."""
    # non-blocking, in case the file became a pipe
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"expected a regular file, got {kind_of(path) or 'a device'}")
        head = file.read(4)
        file.seek(0)
        for first, (what, command) in COMPRESSED.items():
            if head.startswith(first):
                raise ValueError(f"{what}; try {command} {shlex.quote(str(path))}")
        data = bytearray()
        with gzip.GzipFile(fileobj=file) if head[:2] == b"\x1f\x8b" else file as stream:
            while chunk := stream.read(CHUNK_BYTES):
                data += chunk
                if len(data) > MAX_FILE_BYTES:
                    raise ValueError(f"more than {MAX_FILE_BYTES:,} bytes")
    return data


class NoClasses(pickle.Unpickler):
    """A second line of defense: `plain_pickle` should have refused any class before."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"a pickle that refers to {module}.{name}")


def plain_pickle(data: bytes) -> Any:
    """Load a pickle after a check that it has only PLAIN_OPCODES, without executing them. Raises
    ValueError, also for a memo index beyond the file, for which pickle would allocate memory."""
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name not in PLAIN_OPCODES:
            raise ValueError(f"a pickle that is not plain data: {opcode.name} at byte {position}")
        if opcode.name.endswith("PUT") and int(argument or 0) not in range(len(data)):
            raise ValueError(f"a pickle with the memo index {argument} at byte {position}")
    return NoClasses(io.BytesIO(data)).load()


def refuse_foreign(path: str) -> None:
    """Raise ValueError if a page or picture would overwrite a file without GENERATOR, or would be
    written to a pipe or a device."""
    check_regular(path)
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        ends = file.read(SEARCHED_BYTES)
        file.seek(max(0, os.path.getsize(path) - SEARCHED_BYTES))
        ends += file.read(SEARCHED_BYTES)
    if ends and GENERATOR.encode() not in ends:
        raise ValueError(f"{path} exists and is no {GENERATOR}; give another path")
