# SPDX-License-Identifier: Apache-2.0
"""Runs a program on fastamp as the Python interpreter would run it."""

from __future__ import annotations

import importlib.util
import io
import pkgutil
import sys
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from fastamp._install.installation import install


def run_program(arguments: list[str]) -> None:
    """Runs what a command line names as python would: a file, ``-m``, ``-c`` or ``-``."""
    kinds = {"-m": run_module, "-c": run_code, "-": run_standard_input}
    run = kinds.get(arguments[0])
    if run is None:
        run_script(arguments)
    else:
        run(arguments[1:])


def run_script(arguments: list[str]) -> None:
    """Runs ``arguments[0]``, a file, or a folder or archive with a ``__main__`` in it."""
    path = str(Path(arguments[0]).absolute())
    importer = pkgutil.get_importer(path)
    if importer is not None:
        _run_container(path, importer, arguments)
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        _refuse(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", code=2)
    _set_search_path(str(Path(path).resolve().parent))
    main = _new_main(path)
    main.__loader__ = SourceFileLoader("__main__", path)
    _run(source, path, main, arguments)


def _run_container(path: str, importer: Any, arguments: list[str]) -> None:
    spec = importer.find_spec("__main__")
    if spec is None:
        _refuse(f"can't find '__main__' module in {path!r}")
    if sys.path and not _is_path_safe():
        del sys.path[0]
    sys.path.insert(0, path)  # whatever the flags say, as python does it
    _run(*_loaded(spec), arguments)


def run_module(arguments: list[str]) -> None:
    """Runs the module ``arguments[0]`` as ``python -m`` would."""
    if not arguments:
        _refuse("Argument expected for the -m option", code=2)
    name = arguments[0]
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                _refuse(
                    f"No module named {name}.__main__; "
                    f"{name!r} is a package and cannot be directly executed"
                )
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _refuse(f"Error while finding module specification for {name!r} ({_described(error)})")
    if spec is None:
        _refuse(f"No module named {name}")
    if getattr(spec.loader, "get_code", None) is None:
        _refuse(f"No code object available for {name}")
    code, origin, main = _loaded(spec)
    _run(code, origin, main, [spec.origin or name, *arguments[1:]])


def run_code(arguments: list[str]) -> None:
    """Runs ``arguments[0]``, which is source code."""
    if not arguments:
        _refuse("Argument expected for the -c option", code=2)
    _set_search_path("")
    _run(arguments[0] + "\n", "<string>", _new_main(None), ["-c", *arguments[1:]])


def run_standard_input(arguments: list[str]) -> None:
    """Runs the source code on the standard input."""
    _set_search_path("")
    _run(sys.stdin.read(), "<stdin>", _new_main("<stdin>"), ["-", *arguments])


def _refuse(text: str, code: int = 1) -> NoReturn:
    sys.stderr.write(f"{sys.executable} -m fastamp: {text}\n")
    sys.exit(code)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_path_safe() -> bool:
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def _set_search_path(first: str) -> None:
    """Puts the program's folder where python would, in the place of the one for ``-m fastamp``."""
    if sys.path and not _is_path_safe():
        sys.path[0] = first


def _new_main(file: str | None) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__loader__ = BuiltinImporter  # as python has it
    _set_if_usual(main, "__annotations__", {})  # to Python 3.13
    if file is not None:
        main.__dict__["__file__"] = file
        _set_if_usual(main, "__cached__", None)  # to Python 3.14
    return main


def _set_if_usual(main: ModuleType, name: str, value: object) -> None:
    """Sets a name if this Python sets it in main modules, such as the one that runs fastamp."""
    if name in vars(sys.modules["__main__"]):
        main.__dict__[name] = value


def _loaded(spec: ModuleSpec) -> tuple[CodeType, str, ModuleType]:
    loader: Any = spec.loader
    code: CodeType = loader.get_code(spec.name)
    main = _new_main(spec.origin)
    main.__loader__ = loader
    main.__spec__ = spec
    main.__package__ = spec.parent
    _set_if_usual(main, "__cached__", spec.cached)
    return code, spec.origin or spec.name, main


def _run(program: bytes | str | CodeType, file: str, main: ModuleType, argv: list[str]) -> None:
    sys.argv[:] = argv
    sys.modules["__main__"] = main
    install()
    try:
        if not isinstance(program, CodeType):
            program = compile(program, file, "exec", dont_inherit=True)
        exec(program, main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        # The interpreter prints it, with the right exit code, but does not know what to leave out.
        _print_without_our_frames()
        raise


def _print_without_our_frames() -> None:
    users_hook = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        while traceback is not None and not _runs_program(traceback):
            traceback = traceback.tb_next
        # Past exec itself; None where the program did not compile.
        traceback = traceback and traceback.tb_next
        sys.last_traceback = traceback
        users_hook(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = excepthook


def _runs_program(traceback: TracebackType) -> bool:
    return traceback.tb_frame.f_code is _run.__code__
