// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/runtime/launch.h"

#include "simulated_cuda/kernels/table.h"
#include "simulated_cuda/runtime/calls.h"
#include "simulated_cuda/runtime/memory.h"
#include "simulated_cuda/runtime/settings.h"
#include "simulated_cuda/runtime/streams.h"

#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <utility>

namespace simulated_cuda {
namespace {

constexpr unsigned kMostThreads = 1024;

std::map<const void*, std::string>& registered() {
  static auto* const all = new std::map<const void*, std::string>();
  return *all;
}

Kernel find_kernel(const std::string& name) {
  static const auto find = reinterpret_cast<FindKernel>(
      find_beside("libsimulated_cuda_kernels.so", "simulated_cuda_find_kernel"));
  static auto* const known = new std::map<std::string, Kernel>();
  const auto it = known->find(name);
  if (it != known->end()) {
    return it->second;
  }
  return (*known)[name] = find == nullptr ? Kernel{} : find(name.c_str());
}

}  // namespace

void* find_beside(const char* library, const char* function) {
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&find_beside), &self);
  std::string path = self.dli_fname;
  path = path.substr(0, path.rfind('/') + 1) + library;
  void* const handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  void* const found = handle == nullptr ? nullptr : dlsym(handle, function);
  if (found == nullptr) {
    std::fprintf(stderr, "simulated CUDA: %s\n", dlerror());
  }
  return found;
}

void register_kernel(const void* stub, const char* name) {
  const std::scoped_lock lock(state_mutex());
  registered()[stub] = name;
}

cudaError_t launch(const void* stub, dim3 grid, dim3 block, void** arguments, cudaStream_t handle) {
  const auto found = registered().find(stub);
  const std::string name = found == registered().end() ? "(not registered)" : found->second;
  const Kernel kernel = name.find("fastamp") == std::string::npos ? Kernel{} : find_kernel(name);
  if (kernel.make == nullptr) {
    return because(cudaErrorInvalidDeviceFunction, "the kernel %s is not simulated", name.c_str());
  }
  if (grid.x == 0 || block.x == 0 || block.x > kMostThreads) {
    return because(cudaErrorInvalidConfiguration, "%u blocks of %u threads", grid.x, block.x);
  }
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || stream->device != thread_state().device) {
    return because(cudaErrorInvalidResourceHandle,
                   "a launch on a stream of device %d, where device %d is current",
                   stream == nullptr ? -1 : stream->device, thread_state().device);
  }
  count(Count::launches);
  const auto run = kernel.make(kernel.function, arguments, grid.x, block.x);
  const auto work = [run, device = stream->device] {
    const DeviceCode memory(device);
    run();
  };
  submit(*stream, work, name.c_str());
  return cudaSuccess;
}

void open_redirection() {
  static const bool opened = [] {
    if (settings().redirects) {
      if (void* const function =
              find_beside("libsimulated_cuda_redirect.so", "simulated_cuda_redirect");
          function != nullptr) {
        reinterpret_cast<void (*)()>(function)();
      }
    }
    return true;
  }();
  (void)opened;
}

}  // namespace simulated_cuda
