// SPDX-License-Identifier: Apache-2.0
#include "simulated_cuda/runtime/calls.h"

#include "simulated_cuda/runtime/memory.h"
#include "simulated_cuda/runtime/settings.h"
#include "simulated_cuda/runtime/streams.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace simulated_cuda {
namespace {

/// Whether CUDA refuses the call while a stream is captured that the thread must not disturb.
enum class UnderCapture : std::uint8_t { kSafe, kUnsafe };

struct Entry {
  const char* name;
  UnderCapture capture;
};

constexpr Entry kFunctions[] = {
#define SIMULATED(name, capture) {#name, UnderCapture::capture},
#define REFUSED(name) {#name, UnderCapture::kSafe},
#include "simulated_cuda/runtime/functions.inc"
#undef SIMULATED
#undef REFUSED
};

constexpr const char* kCounts[] = {"launches",          "operators",        "waits",
                                   "waits_for_undone",  "copies_to_device", "copies_to_host",
                                   "copies_on_devices", "collectives"};
static_assert(std::size(kCounts) == static_cast<std::size_t>(Count::kCount));

std::atomic<std::uint64_t> g_calls[std::size(kFunctions)];
std::atomic<std::uint64_t> g_counts[std::size(kCounts)];

int number_from(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : static_cast<int>(std::strtol(text, nullptr, 10));
}

/// A child that was forked after the first call has no CUDA.
bool is_forked() {
  static const pid_t process = getpid();
  return process != getpid();
}

}  // namespace

const Settings& settings() {
  static const Settings all{
      std::clamp(number_from("SIMULATED_CUDA_DEVICES", 2), 0, kMostDevices),
      number_from("SIMULATED_CUDA_CAPABILITY", 90),
      number_from("SIMULATED_CUDA_GUARDS", 0) != 0,
      number_from("SIMULATED_CUDA_TRACE", 0) != 0,
      number_from("SIMULATED_CUDA_NO_REDIRECT", 0) == 0,
      number_from("SIMULATED_CUDA_LATE", 0) != 0,
  };
  return all;
}

bool traces() { return settings().trace; }

void count(Count what) { ++g_counts[static_cast<std::size_t>(what)]; }
void count_operator() { count(Count::operators); }

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

std::recursive_mutex& state_mutex() {
  static auto* const mutex = new std::recursive_mutex();
  return *mutex;
}

cudaError_t begin_call(Function function) {
  const auto index = static_cast<std::size_t>(function);
  ++g_calls[index];
  if (is_forked()) {
    return because(cudaErrorInitializationError, "%s in a child that was forked after CUDA's start",
                   kFunctions[index].name);
  }
  if (kFunctions[index].capture == UnderCapture::kUnsafe && disturb_captures()) {
    return because(cudaErrorStreamCaptureUnsupported, "%s while a stream is captured",
                   kFunctions[index].name);
  }
  return cudaSuccess;
}

cudaError_t end_call(cudaError_t result) {
  if (result != cudaSuccess) {
    thread_state().error = result;
  }
  return result;
}

cudaError_t because(cudaError_t error, const char* format, ...) {
  std::va_list values;
  va_start(values, format);
  std::fputs("simulated CUDA: ", stderr);
  std::vfprintf(stderr, format, values);
  std::fprintf(stderr, ": %s\n", name_of(error));
  va_end(values);
  return error;
}

/// Of refused.cpp, which does not know CUDA's types.
int refuse(const char* function) {
  const auto found = std::ranges::find_if(
      kFunctions, [&](const Entry& entry) { return std::strcmp(entry.name, function) == 0; });
  ++g_calls[found - std::begin(kFunctions)];
  return end_call(because(cudaErrorNotSupported, "%s is not simulated", function));
}

const char* name_of(cudaError_t error) {
  switch (error) {
#define ERROR(name, text) \
  case name:              \
    return #name;
#include "simulated_cuda/runtime/errors.inc"
#undef ERROR
    default:
      return "an error that is not simulated";
  }
}

const char* text_of(cudaError_t error) {
  switch (error) {
#define ERROR(name, text) \
  case name:              \
    return text;
#include "simulated_cuda/runtime/errors.inc"
#undef ERROR
    default:
      return "an error that is not simulated";
  }
}

}  // namespace simulated_cuda

// For tests (tests/python/support/simulated_cuda.py).
extern "C" {

/// How often a function was called, or something of Count was done; ~0: there is no such name.
std::uint64_t simulated_cuda_count(const char* name) {
  using namespace simulated_cuda;
  for (std::size_t i = 0; i < std::size(kCounts); ++i) {
    if (std::strcmp(name, kCounts[i]) == 0) return g_counts[i];
  }
  for (std::size_t i = 0; i < std::size(kFunctions); ++i) {
    if (std::strcmp(name, kFunctions[i].name) == 0) return g_calls[i];
  }
  return ~std::uint64_t{0};
}

void simulated_cuda_fail_allocations(unsigned long first, bool until_freed) {
  simulated_cuda::fail_allocations(first, until_freed);
}

/// Returns whether work was late before.
bool simulated_cuda_set_late(bool late) { return simulated_cuda::set_late(late); }

}  // extern "C"
