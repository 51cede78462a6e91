"""Private directory shared by the ranks of one torchrun on this machine.

The first rank creates a directory with a random name that only its user can enter, and writes its
path into the user's cache, under a name derived from the torchrun process. No name in the shared
temporary directory is predictable, and nothing owned by another user is used. Torch's own store
would require importing torch in a process that does without it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from stepscope.errors import StepscopeError, one_line

_WITHIN_S = 60.0
_POLL_EVERY_S = 0.05


class SharedDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """The shared directory as seen by one rank."""

    folder: Path
    leads: bool
    """True if this rank writes the page."""
    invitation: Path | None = None
    """File that contains the path of the directory, for the other ranks."""
    alone: str = ""
    """Reason why this rank does not share its directory with the others, if it should."""

    def leave(self) -> None:
        """Remove the directory, if this rank created it."""
        if self.invitation is not None:
            self.invitation.unlink(missing_ok=True)
        if self.leads or self.alone:
            shutil.rmtree(self.folder, ignore_errors=True)


def shared_directory(within_s: float = _WITHIN_S) -> SharedDirectory:
    """Return the shared directory. If the ranks cannot share one, each gets its own: the program
    must not fail for that."""
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return SharedDirectory(folder=_new_folder(), leads=True)
    try:
        invitation = _private(_cache()) / _name()
        if leads:
            folder = _new_folder()
            _invite(invitation, folder)
            return SharedDirectory(folder=folder, leads=True, invitation=invitation)
        return SharedDirectory(folder=_invited(invitation, within_s), leads=False)
    except (StepscopeError, OSError, RuntimeError, psutil.Error) as error:
        why = str(error) if isinstance(error, StepscopeError) else one_line(error)
        return SharedDirectory(folder=_new_folder(), leads=leads, alone=why)


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="stepscope-inspect-"))


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepscope" / "inspect"


def _name() -> str:
    """Name shared by all ranks of one torchrun attempt, and by no other process."""
    torchrun = psutil.Process(os.getppid())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{socket.gethostname()}-{torchrun.pid}-{torchrun.create_time():.2f}-{attempt}"


def _private(folder: Path) -> Path:
    """Create the directory if needed; raise an error if others could write into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _require_private(folder)


def _require_private(folder: Path) -> Path:
    try:
        status = folder.lstat()
    except OSError as error:
        raise StepscopeError(f"{folder} cannot be used: {one_line(error)}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise StepscopeError(f"{folder} is not a directory", "remove it")
    if status.st_uid != os.geteuid():
        raise StepscopeError(
            f"{folder} belongs to user {status.st_uid}",
            "set XDG_CACHE_HOME to a directory of yours",
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StepscopeError(f"other users can enter {folder}", f"chmod 700 {folder}")
    return folder


def _invite(invitation: Path, folder: Path) -> None:
    draft = invitation.with_name(f".{invitation.name}.{secrets.token_hex(8)}")
    draft.write_text(str(folder))
    draft.replace(invitation)


def _invited(invitation: Path, within_s: float) -> Path:
    deadline = time.monotonic() + within_s
    while not invitation.exists():
        if time.monotonic() > deadline:
            raise StepscopeError(
                f"the first rank of this machine created no directory within {within_s:g} s"
            )
        time.sleep(_POLL_EVERY_S)
    return _require_private(Path(invitation.read_text()))
