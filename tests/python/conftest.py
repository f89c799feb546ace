# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

import fastamp
import fastamp._C as _C
from patience import patience
from support.autocast_state import fastamp_state, set_torch_state, torch_state
from support.simulated_cuda import is_simulated


def _has_timeout(config_or_manager: pytest.Config | pytest.PytestPluginManager) -> bool:
    manager = getattr(config_or_manager, "pluginmanager", config_or_manager)
    return manager.hasplugin("timeout")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Strict pytest refuses an option and a marker that nobody knows.
    if not _has_timeout(pluginmanager):
        parser.addini("timeout", "of pytest-timeout, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if not _has_timeout(config):
        config.addinivalue_line("markers", "timeout: of pytest-timeout, which is not installed")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not _has_timeout(config):
        missing = "left out: time limits of Python tests: pytest-timeout is not installed"
        terminalreporter.write_line(missing)


def stretch_time_limits(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience(seconds)), append=False)


_FILES_WITHOUT_ITEMS = pytest.StashKey[set[Path]]()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if not report.passed and isinstance(collector, pytest.File):
        collector.config.stash.setdefault(_FILES_WITHOUT_ITEMS, set()).add(collector.path)
    return report


def refuse_files_without_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several files, one whose tests are not found would go unnoticed among the others."""
    files = {Path(arg.partition("::")[0]).resolve() for arg in config.args}
    known = {item.path for item in items} | config.stash.get(_FILES_WITHOUT_ITEMS, set())
    without = sorted(str(path) for path in files - known if path.is_file())
    if without:
        raise pytest.UsageError(f"expected tests in each file, got none in {', '.join(without)}")


@pytest.hookimpl(tryfirst=True)  # Before tests are deselected.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_files_without_tests(config, items)
    if _has_timeout(config) and not config.getoption("timeout"):
        stretch_time_limits(items)
    for item in items:
        if (reason := why_not_here(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_not_here(item: pytest.Item) -> str | None:
    """Says what a test needs of CUDA that this process has not."""
    if item.get_closest_marker("cuda") is not None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        if os.environ.get("FASTAMP_TESTS_BESIDE_CUDA"):  # tools/run_tests.py
            return "needs a CUDA device: left to the run of those that do"
    if item.get_closest_marker("simulated") is not None and not is_simulated():
        return "of the simulated device: run by test_in_children.py"
    needs_gpu = item.get_closest_marker("needs_real_gpu")
    if needs_gpu is not None and is_simulated():
        return f"not simulated: {needs_gpu.args[0]}"
    return None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small models: threads that wait for each other would cost more than these do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def global_state_is_left_as_it_was() -> Iterator[None]:
    torch_before, fastamp_before = torch_state(), fastamp_state()
    yield
    torch_after, fastamp_after = torch_state(), fastamp_state()
    # One failing test must not make those after it fail.
    set_torch_state(torch_before)
    if fastamp_after["policies"] != fastamp_before["policies"]:
        fastamp.policies.reset()
    _C.set_float8_numbers(fastamp_before["recipes"])
    if fastamp_after["installed"] != fastamp_before["installed"]:
        (_C.register_kernels if fastamp_before["installed"] else _C.unregister_kernels)()
    assert torch_after == torch_before
    assert fastamp_after == fastamp_before


@pytest.fixture
def nothing_is_kept_afterwards() -> Iterator[None]:
    """For tests of casts that outlive regions."""
    gc.collect()
    assert fastamp.casts.kept() == (0, 0)
    yield
    gc.collect()
    assert fastamp.casts.kept() == (0, 0)
