// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/step_case.h"

#include "kernels/cpu/dense_cast.h"
#include "kernels/functors/float8_copy.h"
#include "kernels/functors/noise.h"
#include "kernels/functors/remainder.h"

#include <ATen/ops/from_blob.h>

#include <array>
#include <cmath>

namespace fastamp::test {
namespace {

constexpr std::size_t kManyGroups = 4;

std::size_t params_in_group(const StepCase& c) {
  return c.groups > kManyGroups ? 2 : (edge_sizes().size() + c.groups - 1) / c.groups;
}

/// What the n-th parameter of a case is.
bool has_master(std::size_t n) { return n % 4 == 1; }
bool has_copy(std::size_t n) { return n % 4 == 2; }
bool uses_amsgrad(const StepCase& c, std::size_t group) { return c.amsgrad && group % 2 == 0; }

/// Adds one parameter to the lists.
class Builder {
 public:
  Builder(const StepCase& c, bool adam, StepLists& lists)
      : case_(c), adam_(adam), lists_(lists), values_(static_cast<unsigned>(c.skew) + 17) {}

  void add(std::size_t group) {
    numel_ = edge_sizes()[(n_ * 7 + case_.skew) % edge_sizes().size()];
    group_of_codes_ = adam_ ? group_of_codes(case_, group, n_) : 0;
    if (group_of_codes_ != 0) {
      numel_ = (numel_ + group_of_codes_ - 1) / group_of_codes_ * group_of_codes_;
    }
    if (has_master(n_)) {
      add_master();
    } else {
      lists_.params.push_back(values_.tensor(numel_, at::kFloat, offset(1)));
      if (has_copy(n_)) {
        lists_.copies.push_back(weight_copy());
        lists_.copy_of.push_back(static_cast<std::int64_t>(n_));
      }
    }
    constexpr std::array<at::ScalarType, 3> kGrads = {at::kFloat, at::kHalf, at::kBFloat16};
    lists_.grads.push_back(values_.tensor(numel_, kGrads[n_ % 3], offset(3), 10.0F));
    add_state(group);
    ++n_;
  }

 private:
  std::size_t offset(std::size_t salt) const {
    return case_.skew == 0 ? 0 : (n_ * case_.skew + salt) % 5;
  }
  /// Among those whose gradients are float32, too, there is each kind.
  at::Tensor weight_copy() {
    const auto kind = (n_ / 4 + n_ / 12) % 3;
    return kind == 2 ? float8_copy(values_, numel_)
                     : values_.tensor(numel_, kind == 0 ? at::kHalf : at::kBFloat16, offset(2));
  }
  at::ScalarType half() const { return n_ % 8 < 4 ? at::kHalf : at::kBFloat16; }

  void add_master() {
    const auto master = values_.tensor(numel_, at::kFloat, offset(1));
    const auto param = guarded(numel_, half(), offset(2));
    kernels::cpu::cast_contiguous(master.const_data_ptr(), at::kFloat, param.mutable_data_ptr(),
                                  half(), numel_);
    const bool has_remainders = case_.remainders && n_ / 4 % 3 != 0;
    lists_.masters.push_back(has_remainders ? remainders_of(master, param) : master);
    if (numel_ > 5) {
      set_element(param, 4, 7.0F);  // somebody has written it since the last step
      set_element(param, numel_ - 1, -7.0F);
      if (has_remainders) {
        set_element(param, 2, 0.0F);
      }
    }
    lists_.params.push_back(param);
  }

  at::Tensor remainders_of(const at::Tensor& master, const at::Tensor& param) {
    const auto remainders = guarded(numel_, at::kShort, offset(1));
    for (std::int64_t i = 0; i < numel_; ++i) {
      const float weight = element_of(master, i);
      const float rounded = element_of(param, i);
      const auto remainder = half() == at::kHalf
                                 ? kernels::Remainder<c10::Half>::of(weight, rounded)
                                 : kernels::Remainder<c10::BFloat16>::of(weight, rounded);
      remainders.mutable_data_ptr<std::int16_t>()[i] = static_cast<std::int16_t>(remainder);
    }
    return remainders;
  }

  /// Any codes, and scales of all ranges: the first, the last, and of groups that are not finite.
  void add_codes() {
    lists_.first.push_back(bytes(numel_, 4, 0, 255));
    lists_.second.push_back(bytes(numel_, 0, 0, 255));
    const auto kind = n_ / 3 % 4;
    const int lowest = kind == 0 ? 1 : kind == 1 ? 223 : 100;
    const int highest = kind == 0 ? 12 : kind == 1 ? 255 : 120;
    lists_.scales.push_back(bytes(2 * numel_ / group_of_codes_, 3, lowest, highest));
  }

  at::Tensor bytes(std::int64_t numel, std::size_t salt, int lowest, int highest) {
    const auto tensor = guarded(numel, at::kByte, offset(salt));
    for (std::int64_t i = 0; i < numel; ++i) {
      seed_ = seed_ * 1664525U + 1013904223U;
      tensor.mutable_data_ptr<std::uint8_t>()[i] = static_cast<std::uint8_t>(
          lowest + static_cast<int>((seed_ >> 16U) % static_cast<unsigned>(highest - lowest + 1)));
    }
    return tensor;
  }

  void add_state(std::size_t group) {
    if (group_of_codes_ != 0) {
      add_codes();
      const auto count = guarded(1, at::kFloat);
      set_element(count, 0, static_cast<float>(n_));
      lists_.steps.push_back(count);
      return;
    }
    const auto moment = case_.bf16_moments ? at::kBFloat16 : at::kFloat;
    if (has_momentum(adam_, group)) {
      lists_.first.push_back(values_.tensor(numel_, moment, offset(4)));
      const auto count = guarded(1, at::kFloat);
      const bool far = case_.noisy && n_ % 7 == 5;  // where torch's counters stand still
      const float seen = far ? 33554432.0F : static_cast<float>(n_);
      set_element(count, 0, n_ % 3 == 0 ? 0.0F : seen);
      lists_.steps.push_back(count);
    }
    if (adam_) {
      lists_.second.push_back(values_.positive(numel_, moment, offset(0)));
      if (uses_amsgrad(case_, group)) {
        lists_.greatest.push_back(values_.positive(numel_, moment, offset(1)));
      }
    }
  }

  const StepCase& case_;
  bool adam_;
  StepLists& lists_;
  Values values_;
  std::size_t n_ = 0;
  std::int64_t numel_ = 0;
  std::int64_t group_of_codes_ = 0;
  unsigned seed_ = 1;
};

constexpr auto kHeaderBytes = static_cast<std::int64_t>(kernels::kFloat8HeaderBytes);

bool is_float8(const at::Tensor& copy) { return copy.scalar_type() == at::kFloat8_e4m3fn; }

at::Tensor behind_header(const at::Tensor& bytes) {
  return bytes.narrow(0, kHeaderBytes, bytes.numel() - kHeaderBytes).view(at::kFloat8_e4m3fn);
}

/// Weight copies, fp8 ones as bytes with their headers.
std::vector<at::Tensor> headers_and_copies(const std::vector<at::Tensor>& copies) {
  std::vector<at::Tensor> all;
  for (const auto& copy : copies) {
    all.push_back(is_float8(copy) ? with_header(copy) : copy);
  }
  return all;
}

}  // namespace

at::Tensor float8_copy(Values& values, std::int64_t numel) {
  const at::Tensor bytes = guarded(kHeaderBytes + numel, at::kByte);
  const at::Tensor copy = behind_header(bytes);
  const at::Tensor numbers = values.tensor(numel, at::kFloat);
  for (std::int64_t i = 0; i < numel; ++i) {
    copy.mutable_data_ptr<c10::Float8_e4m3fn>()[i] =
        c10::Float8_e4m3fn(numbers.const_data_ptr<float>()[i]);
  }
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  *reinterpret_cast<kernels::Float8CopyHeader*>(bytes.mutable_data_ptr()) = {0.0625F, 0, 0, 0};
  return copy;
}

at::Tensor with_header(const at::Tensor& copy) {
  // Not from the data pointer, which an empty tensor does not have.
  auto* const start =
      static_cast<char*>(copy.storage().mutable_data()) + copy.storage_offset() - kHeaderBytes;
  return at::from_blob(start, {kHeaderBytes + copy.numel()}, at::kByte);
}

std::vector<at::Tensor> copies_with_headers(const std::vector<at::Tensor>& copies) {
  std::vector<at::Tensor> all;
  for (const auto& copy : copies) {
    all.push_back(is_float8(copy) ? behind_header(copy_of(with_header(copy))) : copy_of(copy));
  }
  return all;
}

std::vector<StepCase> StepCase::all() {
  if (brief()) {
    return {{2, true, true, false, true, true, true, 1}, {1, false, false, true}, {}};
  }
  std::vector<StepCase> cases;
  for (unsigned bits = 0; bits < 64; bits += 3) {
    const auto bit = [&](unsigned i) { return (bits >> i & 1U) != 0; };
    cases.push_back(
        {bits % 4 == 0 ? 1U : 3U, bit(0), bit(1), bit(2), bit(3), bit(4), bit(5), bits % 5});
  }
  cases.push_back({40, true, false, false, true, false, true, 0});  // two launches
  return cases;
}

StepLists StepLists::copy() const {
  return {copies_of(params),
          copies_of(grads),
          copies_of(first),
          copies_of(second),
          copies_of(greatest),
          copies_of(steps),
          copies_of(masters),
          copies_with_headers(copies),
          copies_of(scales),
          group_sizes,
          copy_of};
}

bool StepLists::same_as(const StepLists& other) const {
  return same_bits(params, other.params) && same_bits(grads, other.grads) &&
         same_bits(first, other.first) && same_bits(second, other.second) &&
         same_bits(greatest, other.greatest) && same_bits(steps, other.steps) &&
         same_bits(masters, other.masters) && same_bits(scales, other.scales) &&
         same_bits(headers_and_copies(copies), headers_and_copies(other.copies));
}

void StepLists::spoil() const {
  for (std::size_t n = 0; n < params.size(); ++n) {
    if (const auto numel = params[n].numel(); numel > 0) {
      set_element(params[n], n % 2 == 0 ? numel / 2 : numel - 1, n % 3 == 0 ? -INFINITY : INFINITY);
    }
  }
}

std::vector<std::int64_t> StepLists::noise_origins(const StepCase& c) const {
  std::vector<std::int64_t> all;
  for (std::size_t n = 0; (c.noisy || c.codes) && n < params.size(); ++n) {
    // Some start where indices of 32 bits overflow.
    const auto origin = kernels::noise_origin(n * 1000003, n % 2 == 0 ? 0 : ~std::uint64_t{0} - n);
    all.push_back(n % 5 == 4 && !c.codes ? -1 : origin);
  }
  return all;
}

std::vector<kernels::StepEntry> StepLists::entries(bool adam, const StepCase& c) const {
  std::vector<kernels::StepEntry> all;
  std::array<std::size_t, 5> used{};  // of masters, copies, first with steps, greatest, scales
  const auto origins = noise_origins(c);
  std::size_t n = 0;
  for (std::size_t g = 0; g < group_sizes.size(); ++g) {
    for (std::int64_t k = 0; k < group_sizes[g]; ++k, ++n) {
      kernels::StepEntry entry;
      entry.noise_origin = origins.empty() ? -1 : origins[n];
      entry.group = g;
      entry.tensors[kernels::kGrad] = &grads[n];
      entry.tensors[kernels::kWeight] = &params[n];
      if (has_master(n)) {
        entry.tensors[kernels::kWeight] = &masters[used[0]++];
        entry.tensors[kernels::kHalf] = &params[n];
      } else if (has_copy(n)) {
        entry.tensors[kernels::kHalf] = &copies[used[1]++];
        entry.half_is_copy = true;
      }
      if (has_momentum(adam, g)) {
        entry.tensors[kernels::kFirst] = &first[used[2]];
        entry.tensors[kernels::kStep] = &steps[used[2]++];
      }
      if (adam) {
        entry.tensors[kernels::kSecond] = &second[n];
        entry.tensors[kernels::kMax] = uses_amsgrad(c, g) ? &greatest[used[3]++] : nullptr;
        if (group_of_codes(c, g, n) != 0) {
          entry.tensors[kernels::kScales] = &scales[used[4]++];
        }
      }
      if (c.turned) {
        turn(entry);
      }
      all.push_back(entry);
    }
  }
  return all;
}

void StepLists::turn(kernels::StepEntry& entry) const {
  for (std::size_t slot = 0; slot < kernels::kSlots; ++slot) {
    const at::Tensor*& t = entry.tensors.at(slot);
    if (t != nullptr && slot != kernels::kStep) {
      t = &views.emplace_back(fastamp::test::turned(*t));
    }
  }
}

std::int64_t group_of_codes(const StepCase& c, std::size_t group, std::size_t n) {
  constexpr std::array<std::int64_t, 3> kGroups = {32, 64, 128};
  return c.codes && !uses_amsgrad(c, group) && n % 3 != 2 ? kGroups[n / 2 % 3] : 0;
}

bool has_momentum(bool adam, std::size_t group) { return adam || group % 3 != 1; }

StepLists make_step_lists(const StepCase& c, bool adam) {
  StepLists lists;
  Builder builder(c, adam, lists);
  for (std::size_t g = 0; g < c.groups; ++g) {
    lists.group_sizes.push_back(static_cast<std::int64_t>(params_in_group(c)));
    for (std::size_t k = 0; k < params_in_group(c); ++k) {
      builder.add(g);
    }
  }
  return lists;
}

AmpStepArgs::AmpStepArgs(const StepCase& c) : found_inf(scalar(c.skips ? 1.0F : 0.0F)) {
  if (c.scales) {
    inv_scale = scalar(0.125F);
  }
  if (c.clips) {
    clip_coef = scalar(0.7F);
    clip_value = 2.0;
  }
}

}  // namespace fastamp::test
