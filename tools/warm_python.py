# SPDX-License-Identifier: Apache-2.0
"""Programs in interpreters that have imported torch already: forked, instead of started.

A test that runs programs spends most of its time on their import of torch. The queue of `make test`
has each process of tests fork another one, before fastamp is imported, that forks again for each
program. It runs as the interpreter would run it, from a `__main__` of its own to the functions at
exit; only the start of the interpreter and the import of torch are behind it.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import IO, Any, NoReturn

TOOLS = Path(__file__).resolve().parent
#: Top-level packages of those who run tests, which no program has imported.
OF_TESTS = ("_pytest", "pytest", "pluggy", "hypothesis", "expecttest", "iniconfig")
#: Beginnings of variables that nobody reads before fastamp is imported.
READ_LATE = (
    "FASTAMP_",
    "PYTEST_",
    "PYTHONPATH",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "COLUMNS",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it by itself
)

# This is imported by a program of tools/, whose folder comes first.
_PATH_OF_INTERPRETER = [path for path in sys.path if path != str(TOOLS)]
_forker: tuple[socket.socket, int] | None = None
_environment: dict[str, str] = {}
_one_at_a_time = threading.Lock()


def begin() -> None:
    """Forks the process that forks programs, in a process that has imported torch, not fastamp."""
    global _forker
    assert "fastamp" not in sys.modules
    _environment.update(os.environ)
    here, there = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        here.close()
        _fork_programs(there)
    there.close()
    here.set_inheritable(False)
    _forker = here, process


def end() -> None:
    """Ends that process, whose CPU time now counts as this one's."""
    global _forker
    if _forker is not None:
        connection, process = _forker
        _forker = None
        connection.close()
        os.waitpid(process, 0)


def can_run(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a program can be forked.

    Not with options of the interpreter, and if its environment is this process's but for what is
    read late enough.
    """
    names = {*environment, *_environment}
    differ = [name for name in names if environment.get(name) != _environment.get(name)]
    is_program = arguments[0] in ("-c", "-m") or not arguments[0].startswith("-")
    return _forker is not None and is_program and all(n.startswith(READ_LATE) for n in differ)


def run(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Runs a program; what :func:`subprocess.run` of ``[sys.executable, *arguments]`` returns.

    Args:
        arguments: ``-c CODE``, ``-m MODULE`` or a file, then the program's.
        environment: All its variables; :func:`can_run` has said yes.
        folder: Where it is run.
        timeout: Seconds after which it is ended.

    Raises:
        subprocess.TimeoutExpired: It has been ended.
    """
    assert _forker is not None
    connection = _forker[0]
    with (
        _one_at_a_time,
        tempfile.TemporaryFile() as request,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        wanted = {"argv": list(arguments), "env": dict(environment), "folder": folder}
        request.write(json.dumps(wanted).encode())
        request.flush()
        files = [file.fileno() for file in (request, output, errors)]
        socket.send_fds(connection, [b"!"], files)
        process = int(connection.recv(32))
        connection.settimeout(timeout)
        try:
            status = connection.recv(32)
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            connection.settimeout(None)
            connection.recv(32)
            raise subprocess.TimeoutExpired([*arguments], timeout) from None
        finally:
            connection.settimeout(None)
        return subprocess.CompletedProcess(
            [sys.executable, *arguments], int(status), _text_of(output), _text_of(errors)
        )


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _fork_programs(connection: socket.socket) -> NoReturn:
    """Forks a program for each request, until the other end is closed."""
    gc.freeze()  # Else each program walks through all objects of torch when it ends.
    while True:
        message, files, _, _ = socket.recv_fds(connection, 1, 3)
        if not message:
            os._exit(0)
        process = os.fork()
        if process == 0:
            connection.close()
            _become_program(files)
        for file in files:
            os.close(file)
        connection.send(b"%d" % process)
        _, status = os.waitpid(process, 0)
        connection.send(b"%d" % os.waitstatus_to_exitcode(status))


def _become_program(files: Sequence[int]) -> NoReturn:
    """Becomes what the interpreter is when it has imported torch and is about to run a program."""
    request, output, errors = files
    with os.fdopen(request, "rb") as file:
        file.seek(0)
        wanted = json.load(file)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
        os.close(source)
    # As the interpreter makes them where no terminal is.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", line_buffering=stream is sys.stderr
        )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, module in list(sys.modules.items()):
        is_tool = Path(getattr(module, "__file__", None) or "").parent == TOOLS
        if is_tool or name.partition(".")[0] in OF_TESTS:
            del sys.modules[name]
    status = _status_of(wanted["argv"])
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("Py_Exit returned")


def _status_of(argv: list[str]) -> int:
    """Runs a program and returns its exit status."""
    try:
        _run(argv)
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
    except BaseException as error:
        # Without the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    else:
        return 0
    return 1


def _run(argv: list[str]) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    first = argv[0]
    if first == "-m":
        _set_path(str(Path.cwd()))
        sys.argv[:] = ["-m", *argv[2:]]
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        return
    if first == "-c":
        _set_path("")
        sys.argv[:] = ["-c", *argv[2:]]
        source: Any = argv[1] + "\n"
        name = "<string>"
    else:
        _set_path(str(Path(first).resolve().parent))
        sys.argv[:] = argv
        name = str(Path(first).absolute())
        source = Path(name).read_bytes()
        main.__dict__.update(
            __file__=name, __cached__=None, __loader__=SourceFileLoader("__main__", name)
        )
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def _set_path(first: str) -> None:
    """Puts the program's folder and PYTHONPATH before what the interpreter has by itself."""
    old, new = map(_python_path, (_environment, os.environ))
    own = [path for path in _PATH_OF_INTERPRETER if path not in old]
    sys.path[:] = list(dict.fromkeys([first, *new, *own]))


def _python_path(environment: Mapping[str, str]) -> list[str]:
    parts = environment.get("PYTHONPATH", "").split(os.pathsep)
    return [str(Path(part).absolute()) for part in parts if part]
