// SPDX-License-Identifier: Apache-2.0
#include "scaler/skip_hooks.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

namespace fastamp::scaler {
namespace {

/// A hook and a copy of its function: it may remove itself.
struct Call {
  std::shared_ptr<SkipHook> hook;
  std::function<void(const Skip&)> callback;
};

/// Lists what is to be called now: a hook may add others.
std::vector<Call> calls_of(const std::vector<std::shared_ptr<SkipHook>>& hooks) {
  std::vector<Call> calls;
  for (const auto& hook : hooks) {
    if (hook->callback) {
      calls.push_back({hook, hook->callback});
    }
  }
  return calls;
}

}  // namespace

std::shared_ptr<SkipHook> SkipHooks::add(SkipHook hook) {
  std::erase_if(hooks_, [](const auto& other) { return !other->callback; });
  return hooks_.emplace_back(std::make_shared<SkipHook>(std::move(hook)));
}

bool SkipHooks::empty() const {
  return std::ranges::none_of(hooks_, [](const auto& hook) { return bool(hook->callback); });
}

bool SkipHooks::waits() const {
  return std::ranges::any_of(hooks_,
                             [](const auto& hook) { return hook->waits && bool(hook->callback); });
}

void SkipHooks::notify(std::list<Skip> skips) {
  due_.splice(due_.end(), skips);
  if (due_.empty() || std::exchange(notifying_, true)) {
    return;
  }
  const std::unique_ptr<bool, void (*)(bool*)> end(&notifying_, [](bool* flag) { *flag = false; });
  while (!due_.empty()) {
    std::vector<Call> calls;
    try {
      calls = calls_of(hooks_);
    } catch (const std::bad_alloc&) {
      return;  // The iteration is over. The next call notifies of its skip.
    }
    const auto skip = std::move(due_.front());
    due_.pop_front();
    for (const auto& [hook, callback] : calls) {
      if (hook->callback) {  // Unless another one has removed it.
        callback(skip);
      }
    }
  }
}

}  // namespace fastamp::scaler
