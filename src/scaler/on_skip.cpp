// SPDX-License-Identifier: Apache-2.0
#include "scaler/grad_scaler_impl.h"
#include "scaler/skip_hooks.h"

#include <fastamp/scaler/on_skip.h>

#include <c10/util/Exception.h>

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
  TORCH_CHECK_VALUE(callback, "register_on_skip: expected a callback, got an empty function");
  auto tell = [callback = std::move(callback)](const scaler::Skip& skip) {
    callback({skip.row, scaler::handle_of(*skip.optimizer).optimizer});
  };
  return SkipHandle(impl_->core.skip_hooks().add({.callback = std::move(tell), .waits = wait}));
}

}  // namespace fastamp
