// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/skip_hooks.h"

#include <fastamp/scaler/on_skip.h>

namespace fastamp::scaler {

/// The hook that calls a C++ program's callback. Called by register_on_skip() of scaler and guard.
/// @throws c10::ValueError if the callback is empty.
SkipHook skip_hook(SkipCallback callback, bool wait);

}  // namespace fastamp::scaler
