// SPDX-License-Identifier: Apache-2.0
#include "scaler/grad_scaler_impl.h"
#include "scaler/skip_callback.h"
#include "scaler/skip_hooks.h"

#include <fastamp/scaler/on_skip.h>

#include <utility>

namespace fastamp {

void SkipHandle::remove() {
  if (const auto hook = hook_.lock()) {
    // Its end may run code of users, and that may come back here.
    const auto callback = std::exchange(hook->callback, nullptr);
  }
}

SkipHandle GradScaler::register_on_skip(SkipCallback callback, bool wait) {
  expect_not_moved_from("register_on_skip");
  return SkipHandle(impl_->core.skip_hooks().add(scaler::skip_hook(std::move(callback), wait)));
}

}  // namespace fastamp
