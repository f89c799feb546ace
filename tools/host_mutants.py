# SPDX-License-Identifier: Apache-2.0
"""Breaks of host code for CUDA that tools/mutate_host.py tries on the simulated device."""

from __future__ import annotations

from dataclasses import dataclass

from mutant_kinds import Change


@dataclass(frozen=True)
class HostGroup:
    """Breaks of one file, and the tests to run.

    Attributes:
        file: A source of the library or of the package, from the root of the repository.
        tests: What pytest runs.
        changes: The breaks.
        late: Whether the device's work is as late as waiting calls allow.
        select: Which tests of those, as pytest's -k has it; "" for all.
        program: A C++ test in the build folder that runs in pytest's place.
    """

    file: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]
    late: bool = False
    select: str = ""
    program: str = ""


GUARDED = "tests/python/ops/test_devices_and_streams.py"
TRAINED = "tests/python/scaler/test_devices_and_streams.py"
GRAPHED = "tests/python/graphed/test_graphed_step.py"
OWN = "tests/python/simulated_cuda/test_host_paths.py"


def _unguarded(file: str, device: str, test: str, select: str) -> HostGroup:
    """The guard of a kernel's device, left out."""
    old = f"  const c10::cuda::CUDAGuard guard({device});\n"
    change = Change(f"no guard of {device}", old, "")
    return HostGroup(f"src/kernels/cuda/{file}", (test,), (change,), select=select)


GROUPS = (
    _unguarded("dense_cast.cu", "sources.front().device()", GUARDED, "together"),
    _unguarded("exponents.cu", "args.exponents.device()", GUARDED, "exponents"),
    _unguarded("fused_adamw.cu", "args.params[0].device()", GUARDED, "Adam"),
    _unguarded("fused_sgd.cu", "args.params[0].device()", TRAINED, "fused"),
    _unguarded("muon.cu", "args.grads[0].device()", GUARDED, "Muon"),
    _unguarded("muon.cu", "args.params[0].device()", GUARDED, "Muon"),
    _unguarded("norm.cpp", "args.inv_scale.device()", GUARDED, "norms"),
    _unguarded("unscale.cu", "args.inv_scale.device()", GUARDED, "unscaling"),
    _unguarded("update_scale.cu", "args.scale.device()", TRAINED, "fused"),
    HostGroup(
        "src/kernels/cuda/float8.cu",
        ("tests/python/simulated_cuda/test_float8.py", GUARDED),
        (
            Change(
                "no guard of a cast's device",
                "  const c10::cuda::CUDAGuard guard(device);\n  std::stable_partition",
                "  std::stable_partition",
            ),
            Change(
                "no guard of a refresh's device",
                "  const c10::cuda::CUDAGuard guard(device);\n  std::vector<TensorEntry<Float8Ref",
                "  std::vector<TensorEntry<Float8Ref",
            ),
            Change(
                "sums on the default stream",
                "             at::cuda::getCurrentCUDAStream(), sums_of(i)",
                "             c10::cuda::getDefaultCUDAStream(), sums_of(i)",
                "emulated kernels of one stream see what another has run already",
            ),
        ),
    ),
    HostGroup(
        "src/kernels/cuda/update_scale.cu",
        (TRAINED,),
        (
            Change(
                "on the default stream",
                "1, 1, at::cuda::getCurrentCUDAStream(), scale_update",
                "1, 1, c10::cuda::getDefaultCUDAStream(), scale_update",
            ),
        ),
        late=True,
    ),
    HostGroup(
        "src/kernels/cuda/upload.cu",
        (OWN, GUARDED, GRAPHED),
        (
            Change(
                "pinned memory is not kept for the copy",
                "  host_allocator->record_event(pinned.get(), pinned.get_context(), "
                "stream.unwrap());\n",
                "",
            ),
            Change(
                "copies on the default stream",
                "cudaMemcpyHostToDevice, stream));",
                "cudaMemcpyHostToDevice, nullptr));",
            ),
            Change(
                "copies under capture",
                "== c10::cuda::CaptureStatus::None) {\n    upload_by_copy",
                "!= c10::cuda::CaptureStatus::Invalidated) {\n    upload_by_copy",
            ),
            Change(
                "pinned memory refused during another capture",
                "  const c10::cuda::CUDAStreamCaptureModeGuard "
                "guard(cudaStreamCaptureModeRelaxed);\n",
                "",
            ),
        ),
        late=True,
        select="table or pinned or unscaling or pass or graph",
    ),
    HostGroup(
        "src/kernels/cuda/zeroed_workspace.cpp",
        (OWN, GUARDED, GRAPHED),
        (
            Change(
                "new memory is not cleared",
                "    C10_CUDA_CHECK(cudaMemsetAsync(memory, 0, enough, stream));\n",
                "",
            ),
            Change(
                "cleared on the default stream",
                "cudaMemsetAsync(memory, 0, enough, stream)",
                "cudaMemsetAsync(memory, 0, enough, nullptr)",
            ),
            Change(
                "devices share it",
                "(*blocks)[{stream.device_index(), stream.id()}]",
                "(*blocks)[{c10::DeviceIndex{0}, stream.id()}]",
            ),
            Change(
                "streams share it",
                "(*blocks)[{stream.device_index(), stream.id()}]",
                "(*blocks)[{stream.device_index(), c10::StreamId{0}}]",
                "emulated kernels of two streams do not run at the same time",
            ),
            Change("does not grow", "if (block.bytes < bytes) {", "if (block.bytes == 0) {"),
            Change(
                "not cleared in a graph",
                "    C10_CUDA_CHECK(cudaMemsetAsync(memory_, 0, bytes, stream));\n",
                "",
            ),
            Change(
                "made anew under capture",
                "== c10::cuda::CaptureStatus::None) {",
                "!= c10::cuda::CaptureStatus::Invalidated) {",
                "simulated graphs and streams do not run at the same time",
            ),
            Change(
                "refused during another capture",
                "  const c10::cuda::CUDAStreamCaptureModeGuard "
                "guard(cudaStreamCaptureModeRelaxed);\n",
                "",
            ),
            Change(
                "the error of a full device stays",
                "  static_cast<void>(cudaGetLastError());  // or the next launch would report it\n",
                "",
            ),
            Change(
                "a full device gives no cached memory back",
                "  c10::cuda::CUDACachingAllocator::emptyCache();\n",
                "",
            ),
        ),
        late=True,
        select="pass or norms or full or graph",
    ),
    HostGroup(
        "src/kernels/cuda/devices.cpp",
        (OWN,),
        (
            Change(
                "no graph has a number",
                "return status == cudaStreamCaptureStatusActive ? id : 0;",
                "return status == cudaStreamCaptureStatusInvalidated ? id : 0;",
            ),
        ),
        select="graph",
    ),
    HostGroup(
        "src/autocast/tensor_identity.cpp",
        (OWN,),
        (
            Change("casts are of any stream", "return {stream.id(), part", "return {0, part"),
            Change(
                "casts are of any graph",
                "part->devices.graph_capture_id(stream)};",
                "std::uint64_t{0}};",
            ),
        ),
        select="cast_serves",
    ),
    HostGroup(
        "src/scaler/readback.cpp",
        (OWN, "tests/python/simulated_cuda/test_device.py"),
        (
            Change(
                "numbers are not waited for",
                "    event.synchronize();  // sync: usually over, since a step lies between start "
                "and use\n",
                "    static_cast<void>(event);\n",
            ),
            Change(
                "no event",
                "    events_[i].record(guard.getStream(devices_[i]));\n",
                "    static_cast<void>(guard);\n",
            ),
            Change(
                "an event of the first device alone",
                "if (std::ranges::find(devices_, number.device()) == devices_.end()) {",
                "if (devices_.empty()) {",
            ),
            Change(
                "an event of the default stream",
                "record(guard.getStream(devices_[i]))",
                "record(guard.getDefaultStream(devices_[i]))",
            ),
            Change("always ready", "return !on_demand_ &&", "return !on_demand_ ||"),
            Change("memory is not pinned", ".pinned_memory(true)", ".pinned_memory(false)"),
            Change(
                "the copy waits",
                "/*non_blocking=*/true);  // towards",
                "/*non_blocking=*/false);  // towards",
            ),
        ),
        late=True,
    ),
    HostGroup(
        "src/scaler/gradient_pass.cpp",
        (TRAINED,),
        (
            Change(
                "flag of another device",
                "if (options_.flag != FlagUse::kCopy && given.device() == device) {",
                "if (options_.flag != FlagUse::kCopy) {",
            ),
            Change(
                "inverse scale of another device",
                ".inv_scale = on_device(inv_scale, device, at::kFloat),",
                ".inv_scale = inv_scale,",
            ),
            Change(
                "norms of two devices are added as they are",
                "sum + on_device(own, sum.device(), at::kDouble) : own;",
                "sum + own : own;",
            ),
        ),
        select="two",
    ),
    HostGroup(
        "src/scaler/scale_ops.cpp",
        (TRAINED,),
        (
            Change(
                "flags stay on their devices",
                "const auto here = on_device(flag, device, flag.scalar_type());",
                "const auto here = device.is_cpu() ? flag.cpu() : flag;",
            ),
            Change(
                "only the first device's flag counts",
                "for (const auto& flag : flags.slice(1)) {",
                "for (const auto& flag : flags.slice(flags.size())) {",
            ),
        ),
        select="two",
    ),
    HostGroup(
        "src/scaler/scale_state.cpp",
        (),
        (
            Change(
                "one replica for all devices",
                "if (candidate.device() == tensor.device()) {",
                "if (candidate.defined()) {",
            ),
            Change(
                "scale of another device",
                "auto result = tensor.mul(on_device(tensors_.scale, tensor.device(), at::kFloat));",
                "auto result = tensor.mul(tensors_.scale);",
            ),
        ),
        program="tests/cpp/fastamp_test_scaler_cuda",
    ),
    HostGroup(
        "src/optim/step_lists.cpp",
        (TRAINED,),
        (
            Change(
                "a step's values stay on their device",
                "return on_device(*tensor, device, tensor->scalar_type());",
                "return device.is_cpu() ? tensor->cpu() : *tensor;",
            ),
        ),
        select="two",
    ),
    HostGroup(
        "python/fastamp/_scaler/graphed_step.py",
        (GRAPHED, OWN),
        (
            Change(
                "captured on the current device",
                "            torch.cuda.device(step.device),\n",
                "            torch.cuda.device(torch.cuda.current_device()),\n",
                "torch.cuda.graph makes its stream's device current; without this it waits for "
                "another's work before it begins, and no test has any there",
            ),
            Change(
                "warms up before what is on the stream",
                "        stream.wait_stream(torch.cuda.current_stream(step.device))\n",
                "",
            ),
            Change(
                "replays a scale of before",
                "            prepare_replay(self.scaler, step.device)\n"
                "        self.graph.replay()\n",
                "            pass\n        self.graph.replay()\n",
            ),
            Change(
                "replays count no writes",
                "        self.written.increment_versions()\n",
                "",
            ),
            Change("inputs are not copied", "held.copy_(leaf, non_blocking=True)", "pass"),
            Change(
                "a global capture",
                'mode = "thread_local"',
                'mode = "global"',
            ),
        ),
        late=True,
    ),
)
