// SPDX-License-Identifier: Apache-2.0
#include "core/thread_bound.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace fastamp {
namespace {

/// Enough numbers per object for one every nanosecond for 18 minutes.
constexpr unsigned kBits = 40;

std::atomic<std::uint64_t> g_objects{0};

}  // namespace

SerialNumbers::SerialNumbers() noexcept
    : last_(g_objects.fetch_add(1, std::memory_order_relaxed) << kBits) {}

void warn_of_other_thread(const char* class_name) noexcept {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true, std::memory_order_relaxed) && !c10::WarningUtils::get_warnAlways()) {
    return;
  }
  try {
    TORCH_WARN(class_name,
               ": expected to be ended on the thread that made it, got another thread, or one that "
               "is ending. Nothing was changed on either thread. Keep such objects in the scope "
               "of a function.");
  } catch (...) {  // NOLINT(bugprone-empty-catch): a warning handler that throws, in a destructor
  }
}

}  // namespace fastamp
