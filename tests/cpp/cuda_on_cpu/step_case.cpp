// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/step_case.h"

#include "kernels/cpu/cast.h"

#include <array>

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
    if (has_master(n_)) {
      add_master();
    } else {
      lists_.params.push_back(values_.tensor(numel_, at::kFloat, offset(1)));
      if (has_copy(n_)) {
        lists_.copies.push_back(values_.tensor(numel_, half(), offset(2)));
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
  at::ScalarType half() const { return n_ % 8 < 4 ? at::kHalf : at::kBFloat16; }

  void add_master() {
    const auto master = values_.tensor(numel_, at::kFloat, offset(1));
    const auto param = guarded(numel_, half(), offset(2));
    kernels::cpu::cast_contiguous(master.const_data_ptr(), at::kFloat, param.mutable_data_ptr(),
                                  half(), numel_);
    if (numel_ > 5) {
      set_element(param, 4, 7.0F);  // somebody has written it since the last step
      set_element(param, numel_ - 1, -7.0F);
    }
    lists_.masters.push_back(master);
    lists_.params.push_back(param);
  }

  void add_state(std::size_t group) {
    const auto moment = case_.bf16_moments ? at::kBFloat16 : at::kFloat;
    if (has_momentum(adam_, group)) {
      lists_.first.push_back(values_.tensor(numel_, moment, offset(4)));
      const auto count = guarded(1, at::kFloat);
      set_element(count, 0, n_ % 3 == 0 ? 0.0F : static_cast<float>(n_));
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
};

}  // namespace

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
  return {copies_of(params),   copies_of(grads), copies_of(first),   copies_of(second),
          copies_of(greatest), copies_of(steps), copies_of(masters), copies_of(copies),
          group_sizes,         copy_of};
}

bool StepLists::same_as(const StepLists& other) const {
  return same_bits(params, other.params) && same_bits(grads, other.grads) &&
         same_bits(first, other.first) && same_bits(second, other.second) &&
         same_bits(greatest, other.greatest) && same_bits(steps, other.steps) &&
         same_bits(masters, other.masters) && same_bits(copies, other.copies);
}

std::vector<kernels::StepEntry> StepLists::entries(bool adam, const StepCase& c) const {
  std::vector<kernels::StepEntry> all;
  std::array<std::size_t, 4> used{};  // of masters, copies, first moments with steps, greatest
  std::size_t n = 0;
  for (std::size_t g = 0; g < group_sizes.size(); ++g) {
    for (std::int64_t k = 0; k < group_sizes[g]; ++k, ++n) {
      kernels::StepEntry entry;
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
      }
      all.push_back(entry);
    }
  }
  return all;
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

StepGateArgs::StepGateArgs(const StepCase& c) : found_inf(scalar(c.skips ? 1.0F : 0.0F)) {
  if (c.scales) {
    inv_scale = scalar(0.125F);
  }
  if (c.clips) {
    clip_coef = scalar(0.7F);
    clip_value = 2.0;
  }
}

}  // namespace fastamp::test
