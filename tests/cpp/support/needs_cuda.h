// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fastamp::test {

/// Whether this executable's tests all need a CUDA device; main() skips them where there is none.
bool needs_cuda();

}  // namespace fastamp::test
