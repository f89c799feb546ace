# SPDX-License-Identifier: Apache-2.0
"""What the package's names are does not depend on what was imported first."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pickle
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fastamp
from support.children import check_python

PACKAGE = Path(fastamp.__file__).parent

#: Modules of the package that users import; all others begin with an underscore.
PUBLIC_MODULES = {
    "fastamp.amp",
    "fastamp.casts",
    "fastamp.cpp",
    "fastamp.cpu",
    "fastamp.cpu.amp",
    "fastamp.cuda",
    "fastamp.cuda.amp",
    "fastamp.debug",
    "fastamp.distributed",
    "fastamp.float8",
    "fastamp.inference",
    "fastamp.optim",
    "fastamp.optim.adam",
    "fastamp.optim.adamw",
    "fastamp.optim.muon",
    "fastamp.optim.sgd",
    "fastamp.policies",
    "fastamp.torch",
}


def modules_in(folder: Path, prefix: str) -> list[str]:
    """Names of the modules in a folder, without importing any: fastamp.torch would become torch."""
    names = []
    for module in pkgutil.iter_modules([str(folder)], prefix):
        names.append(module.name)
        if module.ispkg:
            below = folder / module.name.rpartition(".")[2]
            names += modules_in(below, f"{module.name}.")
    return names


MODULES = modules_in(PACKAGE, "fastamp.")

# torch is imported once, with what the package needs of it. Each module is then imported by two
# children of its own: in one before the package's own __init__ has run a line, in the other, forked
# after the package was imported, again.
CHILDREN = """
import importlib, importlib.util, json, os, sys, traceback, types
import torch

def before_the_package(module):
    spec = importlib.util.find_spec("fastamp")
    package = sys.modules["fastamp"] = importlib.util.module_from_spec(spec)
    importlib.import_module(module)
    spec.loader.exec_module(package)

def again_after_the_package(module):
    importlib.import_module(module)
    if not module.endswith("._C"):  # native: a process loads it once
        del sys.modules[module]
        importlib.import_module(module)

def describe(value):
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return value.__name__ if isinstance(value, types.ModuleType) else f"{type(value)} {name}"

def names_after(order, module):
    order(module)
    import fastamp
    return {name: describe(getattr(fastamp, name)) for name in fastamp.__all__}

def in_child(work, *arguments):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            answer = work(*arguments)
        except BaseException:
            answer = traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.load(pipe)
    os.wait()
    return answer

def others_modules():
    old = {*sys.modules}
    import fastamp
    return [name for name in {*sys.modules} - old if name.partition(".")[0] != "fastamp"]

def all_again():
    import fastamp
    return {name: in_child(names_after, again_after_the_package, name) for name in sys.argv[1:]}

for name in in_child(others_modules):
    importlib.import_module(name)
again = in_child(all_again)
first = {name: in_child(names_after, before_the_package, name) for name in sys.argv[1:]}
print(json.dumps({"before_the_package": first, "again_after_the_package": again}))
"""


@pytest.fixture(scope="module")
def names_by_order() -> dict[str, dict[str, Any]]:
    printed = check_python("-W", "ignore", "-c", CHILDREN, *MODULES)
    answers: dict[str, dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return answers


@pytest.mark.parametrize("module", MODULES)
def test_names_are_the_same_whenever_a_module_is_imported(module: str, names_by_order):
    wanted = names_by_order["again_after_the_package"]["fastamp._C"]
    assert set(wanted) == set(fastamp.__all__)
    for order, names in names_by_order.items():
        assert names[module] == wanted, order


def test_the_import_brings_no_compiler_and_no_plots():
    heavy = {"triton", "torch._inductor", "torch._dynamo", "matplotlib", "onnx", "rich"}
    code = "import sys, torch; old = {*sys.modules}; import fastamp; print(*{*sys.modules} - old)"
    assert not heavy & set(check_python("-c", code).split())


#: What `fastamp` holds beside its modules: torch.amp's names, and those about fastamp itself.
NAMES = {
    "GradScaler",
    "Installation",
    "StepGuard",
    "__version__",
    "autocast",
    "build_info",
    "clip_grad_norm_",
    "custom_bwd",
    "custom_fwd",
    "install",
    "is_installed",
    "uninstall",
}
SUBJECTS = ("casts", "cpp", "debug", "float8", "inference", "policies")
PUBLISHED = ("cuda", "distributed", "optim", *SUBJECTS)


def test_the_package_holds_torchs_names_and_a_module_for_each_subject():
    modules = {name for name in fastamp.__all__ if isinstance(getattr(fastamp, name), ModuleType)}
    assert modules == {"amp", "cpu", "cuda", "distributed", "optim", *SUBJECTS}
    assert set(fastamp.__all__) - modules == NAMES
    assert not modules & sys.stdlib_module_names
    for name in ("GradScaler", "Installation", "StepGuard", "autocast"):
        assert inspect.isclass(getattr(fastamp, name)), name
    for name in ("install", "uninstall", "is_installed", "build_info", "clip_grad_norm_"):
        assert inspect.isfunction(getattr(fastamp, name)), name


def test_modules_that_users_do_not_import_begin_with_an_underscore():
    public = {name for name in MODULES if "._" not in name}
    assert public == PUBLIC_MODULES
    assert not NAMES & {name.removeprefix("fastamp.") for name in MODULES}


@pytest.mark.parametrize("module", PUBLISHED)
def test_what_a_module_publishes_says_where_it_is_imported_from(module: str):
    public = importlib.import_module(f"fastamp.{module}")
    for name in public.__all__:
        value = getattr(public, name)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        there = importlib.import_module(value.__module__)
        assert getattr(there, value.__qualname__) is value, name
        assert "._" not in value.__module__, name
        assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize("module", PUBLISHED)
def test_nothing_that_is_returned_can_be_written(module: str):
    public = importlib.import_module(f"fastamp.{module}")
    kinds = [getattr(public, name) for name in public.__all__]
    kinds = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    assert [kind.__name__ for kind in kinds if not kind.__dataclass_params__.frozen] == []


@pytest.mark.parametrize("module", PUBLISHED)
def test_types_that_functions_return_are_beside_them(module: str):
    public = importlib.import_module(f"fastamp.{module}")
    for name in public.__all__:
        value = getattr(public, name)
        if inspect.isfunction(value):
            returned = str(inspect.signature(value).return_annotation)
            for word in re.findall(r"[A-Za-z_.]+", returned):
                kind = value.__globals__.get(word)
                if inspect.isclass(kind) and kind.__module__.startswith("fastamp"):
                    assert kind.__name__ in public.__all__, (name, word)
