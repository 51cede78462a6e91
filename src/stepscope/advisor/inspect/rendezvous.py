"""A private folder in which the ranks of one torchrun on this machine leave their parts.

The first rank makes a folder with a random name that only its user can enter, and leaves its path
in this user's cache, under a name that follows from the torchrun process. No name in the shared
temporary directory can be foreseen, and nothing is used that belongs to another user. Torch's own
store would need torch in a process that does without it.
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
_LOOK_EVERY_S = 0.05


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    folder: Path
    leads: bool
    """Whether this rank makes the page."""
    invitation: Path | None = None
    """Where the path of the folder is left for the other ranks."""
    alone: str = ""
    """Why this rank does not share its folder with the others, where it should."""

    def leave(self) -> None:
        """The folder goes with the rank that made it."""
        if self.invitation is not None:
            self.invitation.unlink(missing_ok=True)
        if self.leads or self.alone:
            shutil.rmtree(self.folder, ignore_errors=True)


def meet(within_s: float = _WITHIN_S) -> Meeting:
    """The folder of this process. Where the ranks cannot meet, each has a folder of its own: the
    program is not to fail for that."""
    leads = os.environ.get("LOCAL_RANK", "0") == "0"
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return Meeting(folder=_new_folder(), leads=True)
    try:
        invitation = _private(_cache()) / _name()
        if leads:
            folder = _new_folder()
            _invite(invitation, folder)
            return Meeting(folder=folder, leads=True, invitation=invitation)
        return Meeting(folder=_invited(invitation, within_s), leads=False)
    except (StepscopeError, OSError, RuntimeError, psutil.Error) as error:
        why = str(error) if isinstance(error, StepscopeError) else one_line(error)
        return Meeting(folder=_new_folder(), leads=leads, alone=why)


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="stepscope-inspect-"))


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepscope" / "meetings"


def _name() -> str:
    """The same for all ranks of a torchrun, of each of its attempts, and for nobody else."""
    torchrun = psutil.Process(os.getppid())
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{socket.gethostname()}-{torchrun.pid}-{torchrun.create_time():.2f}-{attempt}"


def _private(folder: Path) -> Path:
    """The folder, made where it is not there; an error where others could write into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _own(folder)


def _own(folder: Path) -> Path:
    try:
        found = folder.lstat()
    except OSError as error:
        raise StepscopeError(f"{folder} cannot be used: {one_line(error)}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StepscopeError(f"{folder} is not a folder", "remove it")
    if found.st_uid != os.geteuid():
        raise StepscopeError(
            f"{folder} belongs to user {found.st_uid}", "set XDG_CACHE_HOME to a folder of yours"
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StepscopeError(f"others can enter {folder}", f"chmod 700 {folder}")
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
                f"the first rank of this machine left no folder within {within_s:g} s"
            )
        time.sleep(_LOOK_EVERY_S)
    return _own(Path(invitation.read_text()))
