"""Start the Python processes of the tests by a fork of a process that has imported torch.

Importing torch takes two to three seconds of CPU time, and the tests start hundreds of processes
that do so; importing matplotlib, for a page, takes another half second. `install` makes
`subprocess` and `multiprocessing` ask a server for every process of this interpreter that they
would start. The server has imported these and Stepscope; it forks, and the fork runs the
program as a new interpreter would:

- It is a child of the process that asked: `waitpid`, signals, process groups, sessions and
  /proc/PID/environ are those of any other child.
- The imported modules are not in `sys.modules`. An import statement puts them back, through the
  import hooks of the program, if `sys.path` leads to the same files. Those of Stepscope are in
  `preloaded_package.py`.
- It has a server of its own, for the processes that it starts.
- Triton decides when it is imported whether its functions are interpreted. A program with another
  TRITON_INTERPRET imports it again, from its files.

A process that a fork cannot imitate is started as usual: other interpreter options, other
variables that these libraries or Python read when they start, `preexec_fn`, other users. Tests of
the start itself request the fixture `cold_start`; STEPSCOPE_COLD_START=1 starts all processes as
usual.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import marshal
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple

from preloaded_package import PACKAGE, Preloaded

COLD = "STEPSCOPE_COLD_START"
_PADDING = "STEPSCOPE_FORK_SERVER_PADDING"
"""Room in the memory that /proc/PID/environ shows."""
_ROOM_BYTES = 100_000
_ROOTS = (
    "numpy",
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.optim",
    "torch.profiler",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "msgspec",
    "psutil",
    "rich.table",
    "tyro",
)
"""Modules that the server imports, in this order. What each import adds is put back together."""
_READ_AT_START = (
    "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "KINETO_", "CUDA_",
    "MPL", "PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "TZ",
)  # fmt: skip
_UNBUFFERED, _WITHOUT_BYTECODE = "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"
_OPTIONS = ("-u", "-P", "-B")
"""Options of the interpreter that a fork imitates."""
_INTERPRET = "TRITON_INTERPRET"
_READ_LATER = (
    "PYTHONPATH", _UNBUFFERED, _WITHOUT_BYTECODE, "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", _INTERPRET,
)  # fmt: skip
_HASH_SEED = "PYTHONHASHSEED"
_READ_BY_STEPSCOPE = (
    _INTERPRET, "NSYS_PROFILING_SESSION_ID", "STEPSCOPE_CHANGES", "STEPSCOPE_STUDIES",
)  # fmt: skip
"""Variables that the preloaded modules read when they are imported."""
_ARGUMENTS = 23
"""Number of arguments of `_posixsubprocess.fork_exec` in the supported versions of Python."""
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_FIRST_OWN_FILE = 400
"""Descriptors of this module are above those of the programs, which keep their numbers."""
_MAX_MESSAGE = 1 << 18
_MAX_FILES = 200
_prctl = ctypes.CDLL(None).prctl
_cold_fork_exec = _posixsubprocess.fork_exec
_cold_posix_spawn = os.posix_spawn


class Request(NamedTuple):
    """A process to start."""

    words: list[str]
    folder: str
    environment: dict[bytes, bytes]
    files: list[int]
    """The numbers that the sent descriptors get."""
    new_session: bool
    group: int
    umask: int
    blocked: list[int]
    """The signal mask."""


# The process that starts others.


class Client:
    """Asks the server of this process, which is one of its children."""

    def __init__(self, line: socket.socket, start_environment: dict[bytes, bytes]) -> None:
        self._line = line
        self._owner = os.getpid(), os.geteuid()
        self._lock = threading.Lock()
        self._start_environment = start_environment

    def fork_exec(self, *arguments: Any) -> int:
        """Replace `_posixsubprocess.fork_exec`."""
        if len(arguments) != _ARGUMENTS:
            return _cold_fork_exec(*arguments)
        words, executables, close_files, kept, folder, variables = arguments[:6]
        stdin, _, _, stdout, _, stderr, _, error_pipe = arguments[6:14]
        _, new_session, group, gid, gids, uid, umask, preexec, _ = arguments[14:]
        files = {n: file for n, file in enumerate((stdin, stdout, stderr)) if file >= 0}
        files |= {one: one for one in kept if one != error_pipe}
        if not close_files or any(one is not None for one in (gid, gids, uid, preexec)):
            return _cold_fork_exec(*arguments)
        variables = None if variables is None else dict(one.split(b"=", 1) for one in variables)
        started = self._start(
            words, executables, variables, files, folder, bool(new_session), group, umask
        )
        return _cold_fork_exec(*arguments) if started is None else started

    def posix_spawn(self, path: Any, words: Any, variables: Any, /, **options: Any) -> int:
        """Replace `os.posix_spawn`."""
        started = None
        if options.keys() <= {"setsigmask"}:
            names = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
            numbers = map(int, os.listdir("/proc/self/fd"))
            files = {one: one for one in numbers if one > 2 and _is_inherited(one)}
            mask = options.get("setsigmask")
            started = self._start(words, [path], names, files, blocked=mask)
        return _cold_posix_spawn(path, words, variables, **options) if started is None else started

    def _start(
        self,
        words: Sequence[Any],
        executables: Sequence[Any],
        environment: dict[bytes, bytes] | None,
        files: dict[int, int],
        folder: Any = None,
        new_session: bool = False,
        group: int = -1,
        umask: int = -1,
        blocked: Sequence[int] | None = None,
    ) -> int | None:
        """Return the id of the new process, or None if a fork would not be the same."""
        if (os.getpid(), os.geteuid()) != self._owner:
            return None
        if [os.fsencode(one) for one in executables] != [os.fsencode(sys.executable)]:
            return None
        environment = dict(os.environb) if environment is None else environment
        if environment.get(os.fsencode(COLD)) or not self._same_start(environment):
            return None
        folder = os.getcwd() if folder is None else os.fsdecode(folder)
        if not os.access(folder, os.X_OK) or max(files, default=0) >= _FIRST_OWN_FILE:
            return None
        words = [os.fsdecode(word) for word in words]
        if not _is_program(words[1:], folder):
            return None
        files = {0: 0, 1: 1, 2: 2} | files
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ()) if blocked is None else blocked
        numbers = [int(one) for one in mask]
        request = Request(
            words, folder, environment, list(files), new_session, group, umask, numbers
        )
        with self._lock:
            # The server's grandchild becomes a child of this process.
            _prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                message = marshal.dumps(tuple(request))
                socket.send_fds(self._line, [message], list(files.values()))
                return int(marshal.loads(self._line.recv(_MAX_MESSAGE)))
            except (OSError, EOFError):
                # A closed descriptor, or a server that has ended.
                return None
            finally:
                _prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _same_start(self, environment: dict[bytes, bytes]) -> bool:
        """Whether what the server has imported would be the same in this environment."""
        started = self._start_environment
        size = sum(len(name) + len(value) + 2 for name, value in environment.items())
        return size < _ROOM_BYTES and all(
            environment.get(name, b"") == started.get(name, b"")
            for name in {*environment, *started}
            if _matters(name) and (name != os.fsencode(_HASH_SEED) or name in environment)
        )


def _matters(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text.startswith(_READ_AT_START) and text not in _READ_LATER


def _is_inherited(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:
        return False


def _is_program(words: Sequence[str], folder: str) -> bool:
    """Whether these are the arguments of an interpreter with no options but those of `_OPTIONS`."""
    words = _without_options(words)
    if not words:
        return False
    if words[0] in ("-m", "-c"):
        return len(words) > 1
    return words == ["-"] or (words[0].endswith(".py") and Path(folder, words[0]).is_file())


def _without_options(words: Sequence[str]) -> Sequence[str]:
    return _without_options(words[1:]) if words and words[0] in _OPTIONS else words


def install() -> None:
    """Start a server for this process and use it, unless it has one. Needs Linux."""
    used = getattr(_posixsubprocess.fork_exec, "__self__", None)
    if sys.platform != "linux" or os.environ.get(COLD) or isinstance(used, Client):
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # PYTHONPATH is each program's own. Sets have one order in all of them, as with a fixed seed.
    environment = dict(os.environ)
    for name in ("PYTHONPATH", _UNBUFFERED, _WITHOUT_BYTECODE):
        environment.pop(name, None)
    environment |= {_HASH_SEED: "0", _PADDING: "-" * _ROOM_BYTES}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    folder = next((one for one in sys.path if Path(one, PACKAGE, "__init__.py").is_file()), "")
    arguments = f"{theirs.fileno()}, {os.path.abspath(folder)!r}"
    code += f"import fork_server; fork_server.run_server({arguments})"
    with theirs:
        # Ends with its parent; `Popen` would report that it still runs.
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd="/",
        ).returncode = 0
    _use(Client(ours, {os.fsencode(n): os.fsencode(v) for n, v in environment.items()}))


def _use(client: Client) -> None:
    _posixsubprocess.fork_exec = client.fork_exec
    subprocess._fork_exec = client.fork_exec  # type: ignore[attr-defined]
    os.posix_spawn = client.posix_spawn


# The server.


def run_server(descriptor: int, folder: str) -> None:
    """Import, Stepscope from this folder, then fork a process for every request. Returns in the
    forked processes only, when their program has ended."""
    _die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    sys.path.pop(0)
    sys.path.remove("")
    start_environment = dict(os.environb)
    # The first that is registered runs after all others.
    atexit.register(lambda: stash.forget())
    stash = _import_roots(folder)
    line = socket.socket(fileno=_above(descriptor))
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    request, files, own = _serve(line)
    _use(Client(own, start_environment))
    _imitate_start(request, files)

    def differs(name: str) -> bool:
        key = os.fsencode(name)
        return request.environment.get(key, b"") != start_environment.get(key, b"")

    if differs(_INTERPRET):
        stash.drop("triton")
    if any(map(differs, _READ_BY_STEPSCOPE)):
        stash.preloaded.forget()
    stash.install()
    _run(request.words, stash.preloaded)


def _import_roots(folder: str) -> Stash:
    """Import the modules and hide them again."""
    groups: dict[str, dict[str, ModuleType]] = {}
    at_first = set(sys.modules)
    known = set(sys.modules)
    for root in _ROOTS:
        importlib.import_module(root)
        groups[root] = {name: sys.modules[name] for name in sys.modules if name not in known}
        known = set(sys.modules)
    preloaded = Preloaded(folder)
    for one in weakref.finalize._registry:  # type: ignore[attr-defined]
        # Removing all operators of torch at the exit copies their memory.
        one.atexit = False
    for name in set(sys.modules) - at_first:
        if name.partition(".")[0] in sys.stdlib_module_names:
            for group in groups.values():
                group.pop(name, None)
        else:
            del sys.modules[name]
    return Stash(groups, preloaded)


def _serve(line: socket.socket) -> tuple[Request, list[int], socket.socket]:
    """Return in the process of a request: what it shall be, its files, the line to its server."""
    while True:
        message, files, _, _ = socket.recv_fds(line, _MAX_MESSAGE, _MAX_FILES)
        if not message:
            os._exit(0)
        if not _is_grandchild(line):
            _close(files)
            continue
        request = Request(*marshal.loads(message))
        with contextlib.suppress(OSError):
            if request.new_session:
                os.setsid()
            elif request.group >= 0:
                os.setpgid(0, request.group)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            _die_with_parent()
            ours.close()
            line.close()
            _close(files)
            line = socket.socket(fileno=_above(theirs.detach()))
            continue
        line.close()
        theirs.close()
        return request, files, socket.socket(fileno=_above(ours.detach()))


def _is_grandchild(line: socket.socket) -> bool:
    """Fork twice and answer with the process id; return True in the grandchild, once the process
    between has ended and the client is its parent."""
    answers, answer = os.pipe()
    waits, go = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(answer, marshal.dumps(child))
            os._exit(0)
        _close((answers, answer, go))
        os.read(waits, 1)
        os.close(waits)
        return True
    os.close(answer)
    process_id = os.read(answers, _MAX_MESSAGE)
    os.waitpid(between, 0)
    _close((waits, go, answers))
    line.send(process_id)
    return False


def _above(descriptor: int) -> int:
    """Move a descriptor above those of the programs."""
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FILE)
    os.close(descriptor)
    return moved


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _die_with_parent() -> None:
    parent = os.getppid()
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


# The forked process.


def _imitate_start(request: Request, files: Sequence[int]) -> None:
    """Give this process what it would have if it had been started by `exec`."""
    moved = [_above(file) for file in files]
    # Importing torch leaves files of /sys open.
    os.closerange(3, _FIRST_OWN_FILE)
    for file, number in zip(moved, request.files, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    options = request.words[1 : len(request.words) - len(_without_options(request.words[1:]))]
    unbuffered = "-u" in options or request.environment.get(os.fsencode(_UNBUFFERED))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_standard_stream(number, name, buffered=not unbuffered)
    os.chdir(request.folder)
    if request.umask >= 0:
        os.umask(request.umask)
    os.environb.clear()
    os.environb.update(request.environment)
    _show_environment(request.environment)
    time.tzset()
    tempfile.tempdir = None
    python_path = request.environment.get(b"PYTHONPATH", b"")
    before = [os.path.abspath(os.fsdecode(one)) for one in python_path.split(b":") if one]
    sys.path[:] = list(dict.fromkeys([*before, *sys.path]))
    sys.path_importer_cache.clear()
    sys.orig_argv = list(request.words)
    if "-B" in options or request.environment.get(os.fsencode(_WITHOUT_BYTECODE)):
        sys.dont_write_bytecode = True
        _show_flag(dont_write_bytecode=1)
    if "-P" in options:
        _show_flag(safe_path=True)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def _show_flag(**flag: Any) -> None:
    names = [name for name in dir(sys.flags) if not name.startswith(("_", "n_"))]
    flags = {name: getattr(sys.flags, name) for name in names} | flag
    sys.flags = SimpleNamespace(**flags)  # type: ignore[assignment, misc]


def _open_standard_stream(number: int, name: str, *, buffered: bool) -> None:
    """Replace a stream of `sys`: the server's is not of the same kind of file."""
    before = getattr(sys, name)
    raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
    file: Any = raw
    if number == 0:
        file = io.BufferedReader(raw)
    elif buffered:
        file = io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        file,
        before.encoding,
        before.errors,
        newline="\n",
        line_buffering=buffered and (number == 2 or file.isatty()),
        write_through=not buffered,
    )
    stream.mode = "w" if number else "r"  # type: ignore[misc]
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _show_environment(environment: dict[bytes, bytes]) -> None:
    """Write the environment where /proc/PID/environ reads it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    text = b"".join(name + b"=" + value + b"\0" for name, value in environment.items())
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, min(len(text), end - begin))


def _run(words: Sequence[str], preloaded: Preloaded) -> None:
    """Run the program as `__main__`; its exceptions end the process as they would otherwise."""
    name, *rest = _without_options(words[1:])
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None)
    sys.modules["__main__"] = main
    try:
        if name == "-m":
            sys.argv = ["-m", *rest[1:]]
            _put_first(os.getcwd())
            preloaded.execute(rest[0])
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif name == "-c":
            sys.argv = ["-c", *rest[1:]]
            _put_first("")
            main.__loader__ = importlib.machinery.BuiltinImporter
            exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
        elif name == "-":
            sys.argv = ["-"]
            _put_first("")
            main.__dict__.update(__file__="<stdin>", __cached__=None)
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", "<stdin>")
            code = compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True)
            exec(code, main.__dict__)
        else:
            sys.argv = [name, *rest]
            path = os.path.abspath(name)
            _put_first(str(Path(path).resolve().parent))
            main.__dict__.update(__file__=path, __cached__=None)
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.excepthook = _ignore
        raise


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _ignore(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print nothing: the traceback has been printed."""


class Stash(importlib.abc.MetaPathFinder):
    """Finds the modules that the server has imported."""

    def __init__(self, groups: dict[str, dict[str, ModuleType]], preloaded: Preloaded) -> None:
        self._groups = groups
        self.preloaded = preloaded
        # Caches of the standard library, such as lines of files, are long.
        self._standard = sys.modules.keys() - {"__main__", "builtins", "sys"}
        self._root_of = {name: root for root, group in groups.items() for name in group}
        self._stale: dict[str, list[tuple[ModuleType, str]]] = {}

    def drop(self, package: str) -> None:
        """Let an import execute the Python files of a package again. Modules that have imported it
        get the new one when they are put back."""
        old = self._groups[self._root_of[package]][package]
        self._stale[package] = [
            (module, name)
            for group in self._groups.values()
            for module in group.values()
            for name, value in vars(module).items()
            if value is old
        ]
        for name, root in [*self._root_of.items()]:
            loader = getattr(self._groups[root][name].__spec__, "loader", None)
            if name.partition(".")[0] == package and isinstance(
                loader, importlib.machinery.SourceFileLoader
            ):
                del self._groups[root][name], self._root_of[name]

    def renew(self) -> None:
        """Import what was dropped into the modules that have the old one."""
        while self._stale:
            package, holders = self._stale.popitem()
            new = importlib.import_module(package)
            for module, name in holders:
                setattr(module, name, new)

    def install(self) -> None:
        sys.meta_path[:0] = [self, self.preloaded]
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):
            libc.on_exit(libc._exit, None)

    def forget(self) -> None:
        """Keep the modules from being cleared: they get an extra reference and lose their names.
        Clearing thousands of them, and the destructors of torch's libraries, would copy most of the
        memory, which takes 0.3 s."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((self, sys.modules.copy())))
        for name in (*self._root_of, *self.preloaded.imported, *self._standard):
            sys.modules.pop(name, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = self._root_of.get(fullname)
        if root is None:
            return None
        module = self._groups[root][fullname]
        spec = module.__spec__
        if spec is None or spec.loader is None:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin != spec.origin:
            return None
        return ModuleSpec(
            fullname,
            _Restorer(self, module),
            origin=spec.origin,
            is_package=spec.submodule_search_locations is not None,
        )

    def restored_with(self, name: str) -> Iterator[tuple[str, ModuleType]]:
        """The modules that an import of this one adds: what its root added, or the package of a
        dependency."""
        root = self._root_of[name]
        package = name.partition(".")[0]
        whole = package == root.partition(".")[0]
        for other, module in self._groups[root].items():
            if whole or other.partition(".")[0] == package:
                yield other, module

    def roots_before(self, name: str) -> Iterator[str]:
        root = self._root_of[name]
        if name.partition(".")[0] == root.partition(".")[0]:
            yield from _ROOTS[: _ROOTS.index(root)] if root == "torch" else ()


class _Restorer(importlib.abc.Loader):
    """Puts a module back instead of executing it."""

    def __init__(self, stash: Stash, module: ModuleType) -> None:
        self._stash = stash
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        name = module.__name__
        for root in self._stash.roots_before(name):
            importlib.import_module(root)
        for other, restored in self._stash.restored_with(name):
            sys.modules.setdefault(other, restored)
        if name == "torch._dynamo":
            self._stash.renew()
