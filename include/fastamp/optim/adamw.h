// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/optim/adam.h>

namespace fastamp::optim {

using AdamWOptions = AdamFamilyOptions<true>;
using AdamWParamState = AdamFamilyParamState<true>;
/// torch::optim::AdamW in one fused pass; all else is as with Adam.
using AdamW = AdamFamily<true>;

}  // namespace fastamp::optim
