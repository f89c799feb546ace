// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fastamp::test {

/// A case: edits of a valid archive or dict, drawn from these bytes.
using Case = std::vector<std::uint8_t>;

/// Hands an edited archive to a reader. Returns whether it was taken, and throws std::logic_error
/// for what no reader may do: change something before it refuses, or take what it cannot save.
using Reader = std::function<bool(const Case&)>;

/// What C++ programs read from outside, by name.
const std::map<std::string, Reader>& readers();

}  // namespace fastamp::test
