// SPDX-License-Identifier: Apache-2.0
#include "scaler/skip_callback.h"

#include "scaler/libtorch_optimizer.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fastamp::scaler {

SkipHook skip_hook(SkipCallback callback, bool wait) {
  TORCH_CHECK_VALUE(callback, "register_on_skip: expected a callback, got an empty function");
  auto notify = [callback = std::move(callback)](const Skip& skip) {
    callback({skip.row, handle_of(*skip.optimizer).optimizer});
  };
  return {.callback = std::move(notify), .waits = wait};
}

}  // namespace fastamp::scaler
