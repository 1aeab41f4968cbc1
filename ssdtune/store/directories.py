"""Names of swap directories as users write them, turned into directories that exist and work.

Knows nothing of owners and locks: read `ssdtune.store.lock` next.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from ssdtune.errors import ConfigError


def resolve_directories(names: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return absolute paths without links and `~`; creates nothing.

    A relative name means the current directory of this moment, whatever the process changes to later.

    Raises:
        ConfigError: A name cannot be a directory, or two are the same; all problems are named at once.
    """
    problems: list[str] = []
    paths: list[Path] = []
    if not names:
        problems.append("no swap directory is given. Name one or more in swap_dirs.")
    for name in names:
        try:
            path = _resolve(os.fspath(name))
            if path in paths:
                raise ConfigError(
                    f"swap_dirs: {_show(name)} is the same directory as one before it ({path}). "
                    "Name each directory once."
                )
            paths.append(path)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return paths


def prepare_directories(names: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Resolve the names and create the directories that are missing.

    Raises:
        ConfigError: As for `resolve_directories`, or one cannot be created or written to.
    """
    paths = resolve_directories(names)
    problems: list[str] = []
    identities: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK | os.R_OK):
                read_only = os.statvfs(path).f_flag & os.ST_RDONLY
                code = errno.EROFS if read_only else errno.EACCES
                raise OSError(code, os.strerror(code))
            status = path.stat()
        except OSError as error:
            problems.append(directory_problem(path, error))
            continue
        other = identities.setdefault((status.st_dev, status.st_ino), path)
        if other != path:
            problems.append(f"swap_dirs: {path} and {other} are the same directory. Name it once.")
    if problems:
        raise ConfigError("\n".join(problems))
    return paths


def directory_problem(path: str | os.PathLike[str], error: OSError) -> str:
    """Say why a directory cannot be used, and what to do."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    name = errno.errorcode.get(error.errno or 0, "")
    remedy = {
        errno.EACCES: "Give yourself the right to write there, or name another directory.",
        errno.EPERM: "Give yourself the right to write there, or name another directory.",
        errno.EROFS: "Name a directory on a file system that is not read-only.",
        errno.ENAMETOOLONG: "Name a directory with a shorter path.",
        errno.ENOTDIR: "One of its parents is a file; name another directory.",
        errno.EEXIST: "It is a file; name a directory.",
        errno.ELOOP: "A link in it points to itself; name another directory.",
    }.get(error.errno or 0, "Name another directory in swap_dirs.")
    return f"swap_dirs: cannot use {_show(path)}: {reason} [{name}]. {remedy}"


def _resolve(name: str) -> Path:
    if not name.strip() or "\0" in name:
        raise ConfigError(f"swap_dirs: {name!r} is not the name of a directory.")
    try:
        path = Path(os.path.realpath(Path(name).expanduser()))
        status = path.stat()
    except RuntimeError as error:  # ~user of an unknown user
        raise ConfigError(f"swap_dirs: {name}: {error}. Write the path out.") from error
    except FileNotFoundError:
        return path
    except OSError as error:
        raise ConfigError(directory_problem(name, error)) from error
    if not path.is_dir():
        kind = "file" if path.is_file() else "special file"
        raise ConfigError(
            f"swap_dirs: {path} is a {kind} of {status.st_size} bytes; name a directory."
        )
    return path


def _show(path: str | os.PathLike[str]) -> str:
    """Shorten a very long path for a message."""
    text = os.fspath(path)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-40:]} ({len(text)} characters)"
