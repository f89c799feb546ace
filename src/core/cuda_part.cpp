// SPDX-License-Identifier: Apache-2.0
#include "core/cuda_part.h"

#include "core/build_config.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

namespace fastamp {
namespace {

struct Opened {
  const CudaPart* part = nullptr;
  std::string why_not;
};

/// The folder of this library, wherever the program was found.
std::filesystem::path own_folder() {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&cuda_part), &self) == 0) {
    return {};
  }
  std::error_code failed;
  const auto file = std::filesystem::canonical(self.dli_fname, failed);
  return failed ? std::filesystem::path() : file.parent_path();
}

Opened refused(std::string why_not) { return {.part = nullptr, .why_not = std::move(why_not)}; }

Opened open() {
  const std::string cuda = FASTAMP_CUDA_VERSION;
  if (cuda.empty()) {
    return refused("this fastamp was built without CUDA");
  }
  // A second CUDA runtime in the process would have streams and errors of its own.
  const auto major = at::detail::getCUDAHooks().versionCUDART() / 1000;
  if (std::strtol(cuda.c_str(), nullptr, 10) != major) {
    return refused("fastamp was built for CUDA " + cuda + ", and torch has CUDA " +
                   std::to_string(major));
  }
  const auto file = own_folder() / FASTAMP_CUDA_LIBRARY;
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return refused(std::string("its code for CUDA could not be opened: ") + dlerror());
  }
  using Find = const CudaPart* (*)();
  const auto find = reinterpret_cast<Find>(dlsym(library, "fastamp_cuda_part"));
  const auto* const part = find == nullptr ? nullptr : find();
  if (part == nullptr || std::strcmp(part->build, kCudaPartBuild) != 0) {
    return refused(file.string() + " is of " + (part == nullptr ? "no fastamp" : part->build) +
                   ", not of " + kCudaPartBuild);
  }
  return {.part = part, .why_not = {}};
}

/// Warns once: who built without CUDA knows; a file that is not used, though it was built, is news.
const Opened* open_or_warn() {
  auto* const done = new Opened(open());
  if (done->part == nullptr && *FASTAMP_CUDA_VERSION != '\0') {
    TORCH_WARN("fastamp's kernels for CUDA are not in use: ", done->why_not,
               ". Its scaler and optimizers refuse CUDA tensors. Install or build fastamp for this "
               "torch: docs/install.md says how");
  }
  return done;
}

/// Null as long as torch has no CUDA, which may still be loaded.
const Opened* opened() {
  // A guard alone may be the one that torch makes for fake tensors; without one the hooks, which
  // torch makes once, are not asked for yet.
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA) ||
      !at::detail::getCUDAHooks().hasCUDART()) {
    return nullptr;
  }
  // Never destroyed: other threads may still ask while the process exits.
  static const auto* const once = open_or_warn();
  return once;
}

}  // namespace

const CudaPart* cuda_part() {
  const auto* const found = opened();
  return found == nullptr ? nullptr : found->part;
}

std::string cuda_part_refusal() {
  const auto* const found = opened();
  return found == nullptr ? "torch has no CUDA" : found->why_not;
}

bool is_captured(c10::Device device) {
  const auto* const part = device.is_cuda() ? cuda_part() : nullptr;
  return part != nullptr && part->devices.is_capturing();
}

}  // namespace fastamp
