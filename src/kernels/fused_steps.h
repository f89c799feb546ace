// SPDX-License-Identifier: Apache-2.0
#pragma once

// The fused steps on the host, of SGD, AdamW and, what it has in common with them, Muon. The lists
// of a call become one entry per parameter, pointers into dense memory, in the walk that checks
// them (src/ops). One walk: the tensors of 10 000 parameters do not stay in the cache for a second
// one. Numbers of groups become constants; the kernel of a device takes both.

#include "kernels/functors/adam.h"
#include "kernels/functors/amp_step_values.h"
#include "kernels/functors/learning_rate.h"
#include "kernels/functors/noise.h"
#include "kernels/functors/sgd.h"

#include <fastamp/ops/fused_steps.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace fastamp::kernels {

/// Tensors of a parameter. kWeight is fp32, the parameter or its master, or int16, the remainders
/// of kHalf (functors/remainder.h); kHalf is the 16-bit parameter that follows its master, or the
/// weight copy of an fp32 parameter, which may be fp8 behind a header (functors/float8_copy.h).
/// Unscoped: they index arrays.
// NOLINTNEXTLINE(cppcoreguidelines-use-enum-class)
enum Slot : std::uint8_t { kGrad, kWeight, kHalf, kStep, kFirst, kSecond, kMax, kSlots };
/// Place where an entry whose moments are codes of 8 bits (functors/moment_codes.h) has their
/// scales: for each group those of the first and the second moment. There is no kMax then.
// NOLINTNEXTLINE(cppcoreguidelines-use-enum-class)
inline constexpr Slot kScales = kMax;

/// Arguments that all fused steps have.
struct StepArgs {
  const char* fn;
  at::TensorList params;
  at::TensorList grads;
  at::TensorList masters;
  at::IntArrayRef group_sizes;
  at::ArrayRef<double> lr;
  at::TensorList lr_tensors;
  const std::optional<at::Tensor>& inv_scale;
  const std::optional<at::Tensor>& clip_coef;
  const std::optional<at::Tensor>& found_inf;
  std::optional<double> clip_value;
  bool write_grads;
  at::TensorList weight_copies;
  at::IntArrayRef copy_of;
  at::IntArrayRef noise_origins{};
  at::TensorList moment_scales{};
  const char* grads_name = "grads";  ///< In messages.
};

/// The arguments of an op that all fused steps have.
StepArgs step_args(const ops::FusedSgdArgs& args);
StepArgs step_args(const ops::FusedAdamwArgs& args);

/// A parameter's tensors, null where it has none. Borrowed from the lists of the call.
struct StepEntry {
  std::array<const at::Tensor*, kSlots> tensors{};
  std::size_t group = 0;
  bool half_is_copy = false;
  /// functors/noise.h: moments, if bf16, are rounded stochastically, first ones where they need it
  /// (functors/narrow_moments.h). Negative: to nearest. Codes of 8 bits need it.
  std::int64_t noise_origin = -1;
};

/// Dtypes of an entry's operands and what they are, in one tag of 16 bits; the low five are the
/// caller's.
enum class Storage : std::uint8_t { kFloat, kHalf, kBFloat16, kFloat8 };
/// Entries that steps on CUDA run in kernels of their own.
enum class StepKind : std::uint8_t {
  kPlain,
  kRemainders,  ///< Entries with remainders, and no noise.
  kNoisy,       ///< Entries with noise, with remainders or without.
  kCodes,       ///< Entries with moments in 8 bits, with remainders or without.
  kTurned,      ///< Entries with noise whose memory is in another order than their elements.
};
inline constexpr std::size_t kStepKinds = 5;
struct StepTag {
  static constexpr unsigned kGroupBits = 5;
  static constexpr unsigned kCopyBit = 1U << 11U;
  static constexpr unsigned kNoisyBit = 1U << 12U;
  static constexpr unsigned kRemainderBit = 1U << 13U;
  static constexpr unsigned kGroupShiftBit = 14U;               ///< And the next; of codes.
  static constexpr unsigned kTurnedBit = 1U << kGroupShiftBit;  ///< Of others.
  std::uint16_t bits = 0;

  FASTAMP_HOST_DEVICE Storage of(unsigned which) const {
    return static_cast<Storage>((static_cast<unsigned>(bits) >> (kGroupBits + 2 * which)) & 3U);
  }
  FASTAMP_HOST_DEVICE unsigned group() const { return bits & ((1U << kGroupBits) - 1); }
  /// A weight copy is written from its weight and never read: the weight does not follow it.
  FASTAMP_HOST_DEVICE bool has_copy() const { return (bits & kCopyBit) != 0; }
  /// kWeight holds the remainders of kHalf, which is the parameter.
  FASTAMP_HOST_DEVICE bool has_remainder() const { return (bits & kRemainderBit) != 0; }
  /// Moments are bf16 and rounded stochastically, first ones where they need it.
  FASTAMP_HOST_DEVICE bool is_noisy() const { return (bits & kNoisyBit) != 0; }
  /// Moments are codes of 8 bits, rounded stochastically as well.
  FASTAMP_HOST_DEVICE bool has_codes() const { return of(2) == Storage::kFloat8; }
  /// Noisy ones: their memory is in another order than their elements.
  FASTAMP_HOST_DEVICE bool is_turned() const { return !has_codes() && (bits & kTurnedBit) != 0; }
  /// Sizes of their groups: the logarithm of how many elements they have.
  FASTAMP_HOST_DEVICE unsigned group_shift() const {
    return 5U + (static_cast<unsigned>(bits) >> kGroupShiftBit);
  }
  StepKind kind() const {
    if (has_codes()) {
      return StepKind::kCodes;
    }
    if (is_noisy()) {
      return is_turned() ? StepKind::kTurned : StepKind::kNoisy;
    }
    return has_remainder() ? StepKind::kRemainders : StepKind::kPlain;
  }
};
inline constexpr unsigned kGradBits = 0;
inline constexpr unsigned kHalfBits = 1;
inline constexpr unsigned kMomentBits = 2;

/// An entry in dense memory: element i of every pointer belongs to the same element.
struct DenseEntry {
  std::array<void*, kSlots> pointers{};
  std::int64_t numel = 0;
  std::uint64_t noise_origin = 0;  ///< Of a noisy one, or one with codes.
  ElementOrder order;              ///< Of a noisy one.
  std::size_t group = 0;
  StepTag tag;
};

struct DenseStep {
  /// Entries without elements come last, and only if they have a step counter.
  std::vector<DenseEntry> entries;
  std::vector<std::pair<at::Tensor, at::Tensor>> copied;  ///< Original, dense copy.
  std::array<bool, kStepKinds> kinds{};                   ///< Which there are, by StepKind.

  bool has(StepKind kind) const { return kinds.at(static_cast<std::size_t>(kind)); }
  /// Writes what was computed in copies back to the originals.
  void copy_back() const;
};

/// Order in which the elements of a tensor lie in its memory; none if it is dense and ElementOrder
/// does not say it.
std::optional<ElementOrder> element_order(const at::Tensor& tensor);

/// The entries of a call, in the order of its parameters.
class StepEntries {
 public:
  StepEntries() = default;
  explicit StepEntries(const std::vector<StepEntry>& entries);

  void reserve(std::size_t count) { entries_.reserve(count); }
  /// Writes and copies nothing: entries that follow may be refused.
  void add(const StepEntry& entry);
  /// Copies what is not dense or not laid out as its weight is; leaves the others where they are.
  DenseStep make_dense(bool write_grads) &&;

 private:
  /// One that needs more than addresses: a copy, memory that is made when it is first written, or
  /// an error of torch's about memory that is not there.
  struct Other {
    std::size_t index;
    StepEntry entry;
    bool by_rows;  ///< Its elements have to lie row by row.
  };

  std::vector<DenseEntry> entries_;
  std::vector<Other> others_;
  bool any_empty_ = false;
  std::array<bool, kStepKinds> kinds_{};
};

/// The learning rate of a group. A tensor on the CPU is read now, one on CUDA by the kernel.
LearningRate learning_rate(const StepArgs& args, std::size_t group);

/// The AmpStep of a checked call.
AmpStepPointers amp_step_pointers(const StepArgs& args);

/// The numbers of each group. Reads the learning rates that are on the host.
std::vector<SgdConstants> sgd_constants(const ops::FusedSgdArgs& args);
std::vector<AdamConstants> adam_constants(const ops::FusedAdamwArgs& args);

/// The ops on a device. The arguments have passed their checks (src/ops), which left the entries.
void fused_sgd_cpu(const ops::FusedSgdArgs& args, StepEntries entries);
void fused_sgd_cuda(const ops::FusedSgdArgs& args, StepEntries entries);
void fused_adamw_cpu(const ops::FusedAdamwArgs& args, StepEntries entries);
void fused_adamw_cuda(const ops::FusedAdamwArgs& args, StepEntries entries);

}  // namespace fastamp::kernels
