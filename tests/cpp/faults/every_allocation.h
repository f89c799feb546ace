// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
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

using MakeSubject = std::function<Subject()>;

/// Whether a call uses parts of torch that end the process where they have no memory.
enum class TorchEnds : std::uint8_t {
  kNever,
  /// A graph's nodes when they go: single allocations fail only, and the subject keeps the graph.
  kWithGraphs,
  /// Archives. Allocations fail in a process of their own, and those in which torch ends it count
  /// for nothing. One of kArchiveStride is tried in each round.
  kInArchives,
};

/// Runs the call with each of its allocations failing in turn, alone and with all that come after
/// it, each time on a new subject. A call must end with an error and change nothing, or do all of
/// its work without that memory; the next one must do what the first one does where nothing fails.
/// @param halfway  Makes subjects after a part of the call that is whole in itself, such as
///     unscale_() in a clip: what they look like may be left by a call that failed, too.
/// @return The number of allocations in which torch did not end the process.
int fail_every_allocation(const MakeSubject& make, const std::vector<MakeSubject>& halfway = {},
                          TorchEnds torch_ends = TorchEnds::kNever);

/// How often nets draw other subjects: SEEDS in the environment, 1 if it is not set.
int rounds();

}  // namespace fastamp::test
