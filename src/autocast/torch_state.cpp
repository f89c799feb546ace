// SPDX-License-Identifier: Apache-2.0
#include "autocast/torch_state.h"

#include "core/exit_gate.h"
#include "core/interception.h"
#include "core/system_threads.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <utility>

namespace fastamp::autocast {

namespace {

using Gate = ExitGate<SystemThreads>;

constinit Gate g_gate;

/// Runs before the destructor of torch's cache.
void close_gate() { g_gate.close(); }

/// Handlers run in the reverse order of their registration: torch's cache has to exist first.
void watch_exit() {
  static std::atomic<bool> watches{false};
  if (!watches.load(std::memory_order_relaxed) && !watches.exchange(true)) [[unlikely]] {
    static_cast<void>(std::atexit(close_gate));
  }
}

constinit thread_local Gate::Presence* t_presence = nullptr;

struct EndOfThread {
  EndOfThread() = default;
  EndOfThread(const EndOfThread&) = delete;
  EndOfThread& operator=(const EndOfThread&) = delete;
  EndOfThread(EndOfThread&&) = delete;
  EndOfThread& operator=(EndOfThread&&) = delete;
  /// Code that runs on the thread after this takes another one, and keeps it.
  ~EndOfThread() {
    if (t_presence != nullptr) {
      Gate::give_back(*std::exchange(t_presence, nullptr));
    }
  }
};

Gate::Presence& presence() {
  if (t_presence == nullptr) [[unlikely]] {
    thread_local const EndOfThread end;
    t_presence = &g_gate.take_presence();
  }
  return *t_presence;
}

/// Runs `function` unless this thread is in the cache already, or the process exits.
template <class Function>
void in_torch_cache(const Function& function) {
  g_gate.pass(presence(), function);
}

enum class Answer : std::uint8_t { kUnknown, kFalse, kTrue };

/// Has this thread's regions keep casts to bfloat16 for CPU ops, and ends that.
class KeepsCasts {
 public:
  KeepsCasts() {
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::set_autocast_dtype(c10::kCPU, c10::kBFloat16);
  }
  ~KeepsCasts() {
    at::autocast::set_autocast_cache_enabled(keeps_);
    at::autocast::set_autocast_dtype(c10::kCPU, dtype_);
  }
  KeepsCasts(const KeepsCasts&) = delete;
  KeepsCasts& operator=(const KeepsCasts&) = delete;

 private:
  bool keeps_ = at::autocast::is_autocast_cache_enabled();
  c10::ScalarType dtype_ = at::autocast::get_autocast_dtype(c10::kCPU);
};

/// Has torch cast a weight for its cache in no-grad mode: does that cast require a gradient?
/// Unknown if the cache cannot be entered now.
Answer ask_torch() {
  const c10::impl::ExcludeDispatchKeyGuard unseen(fastamp::detail::kInterceptors);
  const at::DisableRecordFunctionGuard unrecorded;
  const c10::InferenceMode normal_mode(false);
  const at::NoGradGuard no_grad;
  const KeepsCasts keeps;
  const auto cast = leave_in_torch_cache(at::zeros({1}, at::kFloat).requires_grad_());
  if (!cast.defined()) {
    return Answer::kUnknown;
  }
  return cast.requires_grad() ? Answer::kTrue : Answer::kFalse;
}

}  // namespace

c10::ScalarType region_dtype(c10::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}

bool is_weight_cache_enabled() { return at::autocast::is_autocast_cache_enabled(); }

bool is_cached_by_torch(const at::Tensor& tensor) { return at::caching::is_cached_tensor(tensor); }

int region_depth() {
  // torch has no getter for the depth.
  const int depth = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  return depth;
}

bool in_region() {
  return region_depth() > 0 || at::autocast::is_autocast_enabled(c10::kCPU) ||
         at::autocast::is_autocast_enabled(c10::kCUDA);
}

void prepare_to_clear_torch_cache() { presence(); }

void clear_torch_cache() noexcept {
  in_torch_cache([] {
    at::autocast::clear_cache();
    watch_exit();
  });
}

bool weights_always_require_grad() {
  constinit static std::atomic<Answer> known{Answer::kUnknown};
  if (known.load(std::memory_order_relaxed) == Answer::kUnknown) [[unlikely]] {
    known.store(ask_torch(), std::memory_order_relaxed);
  }
  return known.load(std::memory_order_relaxed) != Answer::kFalse;
}

at::Tensor leave_in_torch_cache(const at::Tensor& leaf) {
  at::Tensor kept;
  in_torch_cache([&] {
    const auto cast = at::autocast::cached_cast(region_dtype(c10::kCPU), leaf, c10::kCPU);
    kept = cast.is_same(leaf) ? at::Tensor() : cast;
  });
  return kept;
}

}  // namespace fastamp::autocast
