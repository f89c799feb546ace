// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fastamp::test {

/// What can be seen of a subject: it must be the same after a call that failed.
struct Seen {
  std::vector<at::Tensor> tensors;
  std::string text;

  Seen& add(const at::Tensor& tensor);  ///< Copies it; an undefined one counts as well.
  Seen& add(const std::string& line);
  /// Returns what differs, "" for nothing.
  std::string difference(const Seen& other) const;
};

/// A subject in a state of its own, the call under test, and what can be seen.
struct Subject {
  std::function<void()> call;
  std::function<Seen()> look;
  std::shared_ptr<void> owner;  ///< What the functions refer to.
};

/// Runs the call with each of its allocations failing in turn, each time on a new subject. A call
/// must end with an error and change nothing, or do all of its work without that memory; the next
/// one must do what the first one does where nothing fails. Returns the number of allocations.
int fail_every_allocation(const std::function<Subject()>& make);

}  // namespace fastamp::test
