// SPDX-License-Identifier: Apache-2.0
#include "scaler/gradient_pass.h"

#include "core/device_copy.h"
#include "core/interception.h"
#include "core/kernel_devices.h"
#include "core/tensor_kind.h"
#include "core/tensor_version.h"
#include "kernels/amp_args.h"
#include "ops/checks.h"
#include "scaler/functional_values.h"
#include "scaler/scale_ops.h"

#include <fastamp/ops/amp_ops.h>

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/zeros.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <utility>

namespace fastamp::scaler {
namespace {

/// Guards RecentPasses, and the lists of gradients of the passes in it: one thread may look through
/// them while the step of another lets some go. No code of others runs under it.
constinit std::mutex g_lists;

// Walks over lists of gradients. With thousands of small tensors the time is in waiting for the
// cache lines of each, so the walks ask for them some tensors ahead.

/// A version is two cache lines away: the tensor's, and then that of its counter.
void prefetch_versions(const std::vector<at::Tensor>& gradients, std::size_t i) {
  constexpr std::size_t kTensorAhead = 24;
  constexpr std::size_t kCounterAhead = 12;
  if (i + kTensorAhead < gradients.size()) {
    __builtin_prefetch(gradients[i + kTensorAhead].unsafeGetTensorImpl());
  }
  if (i + kCounterAhead < gradients.size()) {
    const auto& version = gradients[i + kCounterAhead].unsafeGetTensorImpl()->version_counter();
    const void* counter = nullptr;
    static_assert(sizeof(version) == sizeof(counter));  // It is a pointer to the counter.
    std::memcpy(static_cast<void*>(&counter), static_cast<const void*>(&version), sizeof(counter));
    __builtin_prefetch(counter);
  }
}

/// Writes the version of each gradient to `versions`, which is as long, after bumping it if `bump`
/// says that the gradient was written. False if one has no version (inference tensors): `versions`
/// is of no use then.
bool note_versions(const std::vector<at::Tensor>& gradients, bool bump,
                   std::vector<std::uint32_t>& versions) {
  bool all = true;
  bool shared = false;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    prefetch_versions(gradients, i);
    auto* const impl = gradients[i].unsafeGetTensorImpl();
    if (impl->is_inference()) {
      all = false;
      continue;
    }
    if (bump) {
      impl->bump_version();
      shared = shared || !impl->version_counter().unique();
    }
    versions[i] = impl->version_counter().current_version();
  }
  if (shared && all) {  // Views of one tensor have one counter, which went on.
    std::ranges::transform(gradients, versions.begin(), [](const at::Tensor& gradient) {
      return gradient.unsafeGetTensorImpl()->version_counter().current_version();
    });
  }
  return all;
}

/// Empties the list, and then destroys what was in it: code that a gradient's end runs finds none.
void drop_gradients(std::vector<at::Tensor>& gradients) {
  constexpr std::size_t kAhead = 16;
  auto dying = std::exchange(gradients, {});
  for (std::size_t i = 0; i < dying.size(); ++i) {
    if (i + kAhead < dying.size()) {
      __builtin_prefetch(dying[i + kAhead].unsafeGetTensorImpl(), /*rw=*/1);
    }
    dying[i].reset();
  }
}

// Programs alternate between a few sets; one that draws a new set each step must not pile them up.
constexpr std::size_t kSets = 8;

bool is_free(const at::Tensor& tensor) { return tensor.defined() && tensor.use_count() == 1; }

using Identities = std::vector<const c10::TensorImpl*>;

void append_identities(Identities& all, const DeviceGradients& group) {
  for (const auto& gradient : group.gradients) {
    all.push_back(gradient.unsafeGetTensorImpl());
  }
}

Identities identities(const std::vector<DeviceGradients>& groups) {
  Identities all;
  for (const auto& group : groups) {
    append_identities(all, group);
  }
  return all;
}

bool same_set(Identities mine, Identities given) {
  if (mine == given) {
    return true;
  }
  if (mine.size() != given.size()) {
    return false;
  }
  std::ranges::sort(mine);
  std::ranges::sort(given);
  return mine == given;
}

/// The arrays of gradients for one call of a kernel, if it may be called without the dispatcher.
std::vector<kernels::HostArray> usable_arrays(DeviceGradients& group) {
  auto arrays = std::exchange(group.arrays, {});
  if (!arrays.empty() && !nothing_watches_calls()) {
    arrays.clear();
  }
  return arrays;
}

using Passes = std::vector<const PassResult*>;

at::Tensor sum_norms(const Passes& passes, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  for (const auto* pass : passes) {
    TORCH_INTERNAL_ASSERT(pass->has_norm());
    for (const auto& result : pass->devices()) {
      const auto& own = result.sum_of_squares;
      sum = sum.defined() ? sum + on_device(own, sum.device(), at::kDouble) : own;
    }
  }
  if (is_plain_cpu_scalar(sum, at::kDouble)) {
    const double norm = std::sqrt(*sum.const_data_ptr<double>());
    if (dtype != at::kFloat) {
      return at::scalar_tensor(norm, at::TensorOptions().dtype(dtype));
    }
    auto rounded = new_scalar(sum, dtype);
    *rounded.mutable_data_ptr<float>() = static_cast<float>(norm);
    return rounded;
  }
  return at::sqrt(sum).to(dtype);
}

}  // namespace

std::shared_ptr<const NonFiniteCounts> PassBuffers::counts_for(
    c10::Device device, const std::vector<std::uint32_t>& positions) {
  const auto found = std::ranges::find_if(entries_, [&](const auto& entry) {
    return entry->device == device && entry->positions == positions;
  });
  if (found != entries_.end()) {
    std::rotate(entries_.begin(), found, found + 1);
    return entries_.front();
  }
  const auto rows = static_cast<int64_t>(positions.size());
  auto counts = at::zeros({rows, 2}, at::TensorOptions().dtype(at::kLong).device(device));
  auto made = std::make_shared<const NonFiniteCounts>(
      NonFiniteCounts{device, positions, std::move(counts)});
  entries_.insert(entries_.begin(), made);
  if (entries_.size() > kSets) {
    entries_.pop_back();
  }
  return made;
}

at::Tensor PassBuffers::inverse_of(const at::Tensor& scale) {
  if (!is_plain_cpu_scalar(scale, at::kFloat)) {
    return inverse_scale(scale);
  }
  if (is_free(inverse_)) {
    write_inverse(*scale.const_data_ptr<float>(), inverse_);
  } else {
    inverse_ = inverse_scale(scale);
  }
  return inverse_;
}

at::Tensor PassBuffers::sum_beside(const at::Tensor& inv_scale) {
  if (!is_plain_cpu_scalar(inv_scale, at::kFloat)) {
    return new_scalar(inv_scale, at::kDouble);
  }
  if (!is_free(sum_)) {
    sum_ = new_scalar(inv_scale, at::kDouble);
  }
  return sum_;
}

at::Tensor PassBuffers::flag_beside(const at::Tensor& scale) {
  if (!is_spare_flag(flag_, scale)) {
    flag_ = flag_without_value(scale);
  }
  return flag_;
}

at::Tensor PassBuffers::norm_of(double norm) {
  if (!is_free(norm_)) {
    norm_ = at::detail::empty_cpu({}, at::TensorOptions().dtype(at::kFloat));
  }
  *norm_.mutable_data_ptr<float>() = static_cast<float>(norm);
  return norm_;
}

/// A pass while it runs.
class GradientPass {
 public:
  GradientPass(std::vector<DeviceGradients> groups, const at::Tensor& inv_scale,
               const at::Tensor& found_inf, const PassOptions& options)
      : options_(options) {
    auto& devices = result_.devices_;
    devices.reserve(groups.size());
    // Copying tensors of other kinds to a device may run code that changes gradients.
    const bool ordinary = is_ordinary_cpu(inv_scale) && is_ordinary_cpu(found_inf);
    for (auto& group : groups) {
      if (!ordinary) {
        group.arrays.clear();
      }
      const auto device = group.device;
      devices.push_back({
          .seen = std::move(group),
          .inv_scale = on_device(inv_scale, device, at::kFloat),
          .found_inf = flag_on(device, found_inf),
          .sum_of_squares = {},
          .total_norm = {},
          .clip_coef = {},
          .counts = nullptr,
          .versions = {},
      });
      devices.back().versions.resize(devices.back().seen.gradients.size());
    }
    result_.dying_.resize(devices.size());
  }

  PassResult unscale() {
    count_ranges();
    // All that may be missing is made before the first gradient is written.
    for (auto& result : result_.devices_) {
      if (has_kernels(result.seen.device.type())) {
        prepare(result);
      }
    }
    for (auto& result : result_.devices_) {
      const bool has_kernel = has_kernels(result.seen.device.type());
      if (has_kernel) {
        run_unscale(result);
      } else {
        if (overwrites()) {
          result.found_inf.zero_();  // torch's kernel only raises it
        }
        unscale_with_torch(result.seen.gradients, result.inv_scale, result.found_inf);
      }
      take_versions(result, /*bump=*/has_kernel);
      if (has_kernel) {
        bump_version(result.found_inf);
      }
    }
    return std::move(result_);
  }

  PassResult check(std::optional<double> max_norm) {
    count_ranges();
    const bool one_device = result_.devices_.size() == 1;
    for (auto& result : result_.devices_) {
      prepare(result);
      run_check(result, one_device ? max_norm : std::nullopt);
      take_versions(result, /*bump=*/false);
    }
    return std::move(result_);
  }

 private:
  void count_ranges() const {
    if (options_.ranges == nullptr || !options_.ranges->take_turn()) [[likely]] {
      return;
    }
    options_.ranges->start(options_.step);
    for (const auto& result : result_.devices()) {
      options_.ranges->count(result.seen, result.inv_scale);
    }
  }

  bool overwrites() const { return options_.flag == FlagUse::kOverwrite; }

  at::Tensor flag_on(c10::Device device, const at::Tensor& given) const {
    if (options_.flag != FlagUse::kCopy && given.device() == device) {
      return given;
    }
    return overwrites() ? at::empty({}, at::TensorOptions(at::kFloat).device(device))
                        : copy_on(given, device, at::kFloat);
  }

  /// Makes what a kernel writes beside the gradients.
  void prepare(DeviceResult& result) const {
    auto* const buffers = options_.buffers;
    if (buffers != nullptr) {
      result.counts = buffers->counts_for(result.seen.device, result.seen.positions);
    }
    result.sum_of_squares = buffers != nullptr ? buffers->sum_beside(result.inv_scale)
                                               : new_scalar(result.inv_scale, at::kDouble);
  }

  static std::optional<at::Tensor> counts_of(const DeviceResult& result) {
    return result.counts != nullptr ? std::optional(result.counts->counts) : std::nullopt;
  }

  void run_unscale(DeviceResult& result) const {
    const auto& gradients = result.seen.gradients;
    const auto counts = counts_of(result);
    const auto& sum = result.sum_of_squares;
    // Versions are bumped as they are noted, in one walk over the gradients: take_versions().
    const at::AutoDispatchBelowADInplaceOrView no_versions;
    if (result.seen.any_functional) {
      const FunctionalValues plain(gradients);
      ops::unscale_and_check_(plain.values(), result.inv_scale, result.found_inf, sum, counts,
                              overwrites());
      plain.write_back();
      return;
    }
    const auto arrays = usable_arrays(result.seen);
    if (arrays.empty()) {
      ops::unscale_and_check_(gradients, result.inv_scale, result.found_inf, sum, counts,
                              overwrites());
    } else {
      const kernels::UnscaleArgs args{
          gradients, result.inv_scale, result.found_inf, sum, counts, overwrites(), arrays};
      ops::check_unscale(args);
      kernels::unscale_and_check_cpu(args);
    }
  }

  void run_check(DeviceResult& result, std::optional<double> max_norm) const {
    const auto& gradients = result.seen.gradients;
    const auto counts = counts_of(result);
    std::optional<at::Tensor> coefficient;
    std::optional<at::Tensor> norm;
    if (max_norm) {
      coefficient = result.clip_coef = new_scalar(result.inv_scale, at::kFloat);
      norm = result.total_norm = new_scalar(result.inv_scale, at::kFloat);
    }
    const auto arrays = usable_arrays(result.seen);
    if (arrays.empty()) {
      ops::norm_and_check_(gradients, result.inv_scale, result.found_inf, result.sum_of_squares,
                           counts, max_norm, coefficient, norm, overwrites());
      return;
    }
    const kernels::NormArgs args{gradients,        result.inv_scale,
                                 result.found_inf, result.sum_of_squares,
                                 counts,           max_norm,
                                 coefficient,      norm,
                                 overwrites(),     arrays};
    ops::check_norm(args);
    kernels::norm_and_check_cpu(args);
    for (const auto& written : {result.found_inf, result.sum_of_squares, result.clip_coef,
                                result.total_norm, counts.value_or(at::Tensor())}) {
      bump_version(written);
    }
  }

  void take_versions(DeviceResult& result, bool bump) {
    result_.comparable_ =
        note_versions(result.seen.gradients, bump, result.versions) && result_.comparable_;
  }

  const PassOptions& options_;
  PassResult result_;
};

PassResult unscale(std::vector<DeviceGradients> gradients, const at::Tensor& inv_scale,
                   const at::Tensor& found_inf, const PassOptions& options) {
  const at::NoGradGuard no_grad;
  const BelowFunctionalization below(kFunctionalization);
  return GradientPass(std::move(gradients), inv_scale, found_inf, options).unscale();
}

bool can_check(const std::vector<DeviceGradients>& gradients) {
  return std::ranges::all_of(gradients, has_checks);
}

PassResult check(std::vector<DeviceGradients> gradients, const at::Tensor& inv_scale,
                 const at::Tensor& found_inf, const PassOptions& options,
                 std::optional<double> max_norm) {
  TORCH_INTERNAL_ASSERT(can_check(gradients));
  const at::NoGradGuard no_grad;
  const BelowFunctionalization below(kFunctionalization);
  return GradientPass(std::move(gradients), inv_scale, found_inf, options).check(max_norm);
}

bool PassResult::unchanged() const {
  if (!comparable_) {
    return false;
  }
  for (const auto& result : devices_) {
    for (std::size_t i = 0; i < result.versions.size(); ++i) {
      if (version_of(result.seen.gradients[i]) != result.versions[i]) {
        return false;
      }
    }
  }
  return true;
}

bool PassResult::holds(const std::vector<DeviceGradients>& gradients) const {
  if (!unchanged()) {
    return false;
  }
  std::vector<const c10::TensorImpl*> mine;
  for (const auto& result : devices_) {
    append_identities(mine, result.seen);
  }
  return same_set(std::move(mine), identities(gradients));
}

bool PassResult::lists(const std::vector<DeviceGradients>& gradients) const {
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  return unchanged() &&
         std::ranges::equal(
             devices_, gradients, [&](const DeviceResult& mine, const DeviceGradients& other) {
               return mine.seen.positions == other.positions &&
                      std::ranges::equal(mine.seen.gradients, other.gradients, is_same);
             });
}

bool PassResult::saw(const at::Tensor& gradient) const {
  // Of a sparse gradient the pass has the values, each time as another tensor over their storage.
  const bool sparse = gradient.is_sparse();
  const auto* const storage =
      sparse ? gradient._values().storage().unsafeGetStorageImpl() : nullptr;
  return std::ranges::any_of(devices_, [&](const DeviceResult& result) {
    return std::ranges::any_of(result.seen.gradients, [&](const at::Tensor& seen) {
      return sparse ? seen.has_storage() && seen.storage().unsafeGetStorageImpl() == storage
                    : seen.is_same(gradient);
    });
  });
}

bool PassResult::has_norm() const {
  return !devices_.empty() && std::ranges::all_of(devices_, [](const DeviceResult& result) {
    return result.sum_of_squares.defined() && !result.seen.any_duplicates;
  });
}

std::optional<double> PassResult::host_norm() const {
  if (devices_.size() != 1 || !is_plain_cpu_scalar(devices_.front().sum_of_squares, at::kDouble)) {
    return std::nullopt;
  }
  return std::sqrt(*devices_.front().sum_of_squares.const_data_ptr<double>());
}

at::Tensor PassResult::total_norm(at::ScalarType dtype) const {
  if (devices_.size() == 1 && dtype == at::kFloat && devices_.front().total_norm.defined()) {
    return devices_.front().total_norm;
  }
  return sum_norms({this}, dtype);
}

void PassResult::forget() noexcept {
  if (dying_.empty()) {
    comparable_ = false;
    return;
  }
  std::vector<std::vector<at::Tensor>> dying;
  {
    const std::scoped_lock lock(g_lists);
    comparable_ = false;
    dying = std::exchange(dying_, {});
    for (std::size_t i = 0; i < dying.size(); ++i) {
      dying[i].swap(devices_[i].seen.gradients);
      devices_[i].versions.clear();
    }
  }
  // Code of others may run from here on, and destroy this pass.
  for (auto& gradients : dying) {
    drop_gradients(gradients);
  }
}

std::optional<at::Tensor> norm_of_passes(const std::vector<const PassResult*>& passes,
                                         const std::vector<DeviceGradients>& gradients,
                                         at::ScalarType dtype) {
  auto given = identities(gradients);
  const Identities ordered = given;
  std::ranges::sort(given);
  Passes used;
  Identities found;
  std::unique_lock lock(g_lists);
  for (const auto* pass : passes) {
    Identities own;
    for (const auto& result : pass->devices()) {
      append_identities(own, result.seen);
    }
    if (own.empty() || !pass->has_norm() || !pass->unchanged()) {
      continue;
    }
    if (own == ordered) {
      lock.unlock();
      return pass->total_norm(dtype);
    }
    const auto is_theirs = [&](const c10::TensorImpl* impl) {
      return std::ranges::binary_search(given, impl);
    };
    if (std::ranges::all_of(own, is_theirs)) {
      used.push_back(pass);
      found.insert(found.end(), own.begin(), own.end());
    }
  }
  lock.unlock();  // Sums call operators, which may run code of others.
  if (used.empty() || !same_set(std::move(found), std::move(given))) {
    return std::nullopt;
  }
  return sum_norms(used, dtype);
}

RecentPasses& RecentPasses::get() {
  static auto* recent = new RecentPasses;
  return *recent;
}

void RecentPasses::remember(const std::shared_ptr<PassResult>& pass) {
  const std::scoped_lock lock(g_lists);
  passes_.at(next_) = pass;
  next_ = (next_ + 1) % passes_.size();
}

std::optional<at::Tensor> RecentPasses::norm_of(const std::vector<DeviceGradients>& gradients,
                                                at::ScalarType dtype) const {
  std::vector<std::shared_ptr<const PassResult>> alive;
  std::vector<const PassResult*> pointers;
  alive.reserve(passes_.size());
  pointers.reserve(passes_.size());
  {
    const std::scoped_lock lock(g_lists);
    for (std::size_t i = 0; i < passes_.size(); ++i) {  // The oldest first.
      if (auto pass = passes_.at((next_ + i) % passes_.size()).lock()) {
        pointers.push_back(pass.get());
        alive.push_back(std::move(pass));
      }
    }
  }
  return pointers.empty() ? std::nullopt : norm_of_passes(pointers, gradients, dtype);
}

bool has_duplicates(const std::vector<DeviceGradients>& gradients) {
  auto all = identities(gradients);
  std::ranges::sort(all);
  return std::ranges::adjacent_find(all) != all.end();
}

}  // namespace fastamp::scaler
