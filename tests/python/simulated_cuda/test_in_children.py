# SPDX-License-Identifier: Apache-2.0
"""The simulated device, in processes that have it: its self-tests, and what ends a process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from simulated_cuda import libraries, missing_functions
from support.simulated_cuda import BUILD, is_simulated, run_simulated, why_not_built

pytestmark = [
    pytest.mark.skipif(bool(why_not_built()), reason=why_not_built()),
    pytest.mark.skipif(is_simulated(), reason="runs the self-tests, which run here themselves"),
]
FOLDER = Path(__file__).parent


@pytest.mark.slow
def test_the_self_tests_pass():
    command = ["-m", "pytest", str(FOLDER), "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = run_simulated(*command, "-W", "ignore::pytest.PytestConfigWarning")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_the_self_tests_pass_with_a_guard_page_behind_each_tensor():
    command = ["-m", "pytest", str(FOLDER / "test_operators.py"), "-q", "-n", "0", "-k", "basic"]
    done = run_simulated(*command, "-p", "no:cacheprovider", options=("--guards",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


CRASHES = {
    "the host reads": (
        "import ctypes; x = torch.ones(4, device='cuda'); ctypes.string_at(x.data_ptr(), 4)",
        (),
        "device memory is touched by the host (device 0,",
    ),
    "the host writes to the second device": (
        "import ctypes; x = torch.ones(4, device='cuda:1'); ctypes.memset(x.data_ptr(), 0, 4)",
        (),
        "device memory is touched by the host (device 1,",
    ),
    "a kernel reads another device": (
        "import fastamp; x = torch.ones(4, device='cuda:1'); y = torch.zeros((), device='cuda:0')\n"
        "make_storage = torch._C._construct_storage_from_data_pointer\n"
        "storage = make_storage(x.data_ptr(), torch.device('cuda:0'), 16)\n"
        "foreign = torch.empty(0, device='cuda:0').set_(storage, 0, (4,), (1,))\n"
        "torch.ops.fastamp.unscale_and_check_([foreign], y + 0.5, y)",
        (),
        "another device's, is touched by a kernel (device 1,",
    ),
    "an operator reads behind a tensor's end": (
        "x = torch.ones(1024, device='cuda')\n"
        "class Longer:\n"
        "    __cuda_array_interface__ = {'shape': (1028,), 'typestr': '<f4', 'version': 3,\n"
        "                                'data': (x.data_ptr(), False)}\n"
        "torch.as_tensor(Longer(), device='cuda') + 1",
        ("--guards",),
        "memory outside any block, behind a tensor's end or freed, is touched by an operator",
    ),
    "a kernel writes behind a tensor's end": (
        "import fastamp\n"
        "x, one = torch.ones(1024, device='cuda'), torch.ones((), device='cuda')\n"
        "class Longer:\n"
        "    __cuda_array_interface__ = {'shape': (1028,), 'typestr': '<f4', 'version': 3,\n"
        "                                'data': (x.data_ptr(), False)}\n"
        "longer = torch.as_tensor(Longer(), device='cuda')\n"
        "torch.ops.fastamp.unscale_and_check_([longer], one * 0.5, one * 0)",
        ("--guards",),
        "memory outside any block, or another device's, is touched by a kernel",
    ),
}


@pytest.mark.parametrize("case", CRASHES)
def test_forbidden_memory_ends_the_process(case):
    code, options, message = CRASHES[case]
    done = run_simulated("-c", f"import torch\n{code}", options=options)
    assert done.returncode < 0, done.stdout + done.stderr
    assert message in done.stderr


def test_a_call_that_is_not_simulated_tells_its_name():
    code = """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
import torch
torch.ones(1, device="cuda")
"""
    done = run_simulated("-c", code)
    assert done.returncode == 1
    assert "is not simulated: cudaErrorNotSupported" in done.stderr


def test_a_child_that_is_forked_after_the_start_has_no_cuda():
    code = """
import os, ctypes
import torch
torch.ones(1, device="cuda")
runtime = ctypes.CDLL(None)
if os.fork() == 0:
    os._exit(runtime.cudaSetDevice(0))
print(os.waitstatus_to_exitcode(os.wait()[1]), runtime.cudaSetDevice(0))
"""
    done = run_simulated("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3 0\n"  # cudaErrorInitializationError
    assert "cudaSetDevice in a child that was forked after CUDA's start" in done.stderr


@pytest.mark.parametrize(("devices", "capability"), [(1, 80), (4, 100)])
def test_as_many_devices_of_the_capability_as_asked_for(devices, capability):
    code = """
import torch
print(torch.cuda.device_count(), torch.cuda.get_device_capability(torch.cuda.device_count() - 1))
"""
    options = ("--devices", str(devices), "--capability", str(capability))
    done = run_simulated("-c", code, options=options)
    assert done.stdout == f"{devices} {divmod(capability, 10)}\n", done.stderr


def test_a_runtime_that_lacks_functions_of_torch_is_refused_with_their_names(tmp_path):
    folder = Path(torch.__file__).parent / "lib"
    runtime, driver = libraries(BUILD)
    assert missing_functions(runtime, folder) == []
    (tmp_path / runtime.name).symlink_to(driver)  # has none of the runtime's functions
    assert "cudaMalloc" in missing_functions(tmp_path / runtime.name, folder)
