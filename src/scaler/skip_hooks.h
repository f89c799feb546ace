// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/iteration_log.h"

#include <fastamp/macros.h>

#include <functional>
#include <list>
#include <memory>
#include <vector>

namespace fastamp::scaler {

/// A function that is notified of skipped steps.
struct SkipHook {
  std::function<void(const Skip&)> callback;  ///< Empty once it was removed.
  bool waits = false;                         ///< It is notified before update() returns.
};

/// Hooks that are notified of skipped steps, and of which they have not been yet. Not thread-safe.
class FASTAMP_API SkipHooks {
 public:
  std::shared_ptr<SkipHook> add(SkipHook hook);
  bool empty() const;
  /// Whether the device has to be waited for at the end of each iteration.
  bool waits() const;

  /// Notifies of steps, in order, after those that are still due. A hook may do anything but
  /// destroy the scaler; steps that end meanwhile come afterwards. If a hook throws, the hooks
  /// after it do not hear of this step, and the next call goes on with the steps after it.
  void notify(std::list<Skip> skips);

 private:
  std::vector<std::shared_ptr<SkipHook>> hooks_;
  std::list<Skip> due_;
  bool notifying_ = false;
};

}  // namespace fastamp::scaler
