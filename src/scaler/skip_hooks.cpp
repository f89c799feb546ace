// SPDX-License-Identifier: Apache-2.0
#include "scaler/skip_hooks.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace fastamp::scaler {

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

void SkipHooks::notify(std::vector<Skip> skips) {
  std::ranges::move(skips, std::back_inserter(due_));
  if (due_.empty() || std::exchange(notifying_, true)) {
    return;
  }
  const std::unique_ptr<bool, void (*)(bool*)> end(&notifying_, [](bool* flag) { *flag = false; });
  while (!due_.empty()) {
    const auto skip = std::move(due_.front());
    due_.pop_front();
    const auto hooks = hooks_;  // A hook may add others.
    for (const auto& hook : hooks) {
      if (const auto callback = hook->callback) {  // A copy: it may remove itself.
        callback(skip);
      }
    }
  }
}

}  // namespace fastamp::scaler
