// SPDX-License-Identifier: Apache-2.0
#include "cuda_on_cpu/adamw_reference.h"

#include "kernels/functors/float8_copy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace fastamp::test {
namespace {

/// An element of an fp8 copy, by torch's conversion, and what its header says of it.
void set_float8(const at::Tensor& copy, std::int64_t index, float value) {
  constexpr float kMax = 448.0F;
  auto* const out = copy.mutable_data_ptr<c10::Float8_e4m3fn>();
  auto& header = *kernels::float8_header(out);
  const float scaled = std::clamp(value / header.inverse_scale, -kMax, kMax);
  out[index] = c10::Float8_e4m3fn(scaled);
  std::uint32_t bits = 0;
  const float magnitude = std::abs(value);
  std::memcpy(&bits, &magnitude, sizeof(bits));
  header.amax = std::max(header.amax, bits + 1);
}

/// torch/optim/adam.py, _multi_tensor_adam: numbers are made in fp64, and each kernel rounds them.
struct Numbers {
  double lr, beta1, beta2, eps, decay;
  bool decoupled, amsgrad, maximize;
  double step_size, root2;

  Numbers(const AdamwGroups& groups, std::size_t g, float steps_before)
      : lr(groups.lr[g]),
        beta1(groups.beta1[g]),
        beta2(groups.beta2[g]),
        eps(groups.eps[g]),
        decay(groups.decay[g]),
        decoupled(groups.decoupled[g]),
        amsgrad(groups.amsgrad[g]),
        maximize(groups.maximize[g]) {
    const double step = static_cast<double>(steps_before) + 1.0;
    step_size = lr / (1.0 - std::pow(beta1, step)) * -1.0;
    root2 = std::sqrt(1.0 - std::pow(beta2, step));
  }
};

struct State {
  float first, second, greatest;
};

/// at::native::lerp: the formula is exact at the end that is nearer.
float lerp(float start, float end, double weight) {
  const auto w = static_cast<float>(weight);
  const float way = end - start;
  return w < 0.5F ? std::fma(w, way, start) : std::fma(-way, 1.0F - w, end);
}

/// ATen/native/cuda/DeviceAddCmulCdiv.cuh: the inner operation is rounded, then the sum.
float addcmul(float input, float a, float b, double value) {
  return std::fma(static_cast<float>(value), a * b, input);
}
float addcdiv(float input, float a, float b, double value) {
  return std::fma(static_cast<float>(value), a / b, input);
}

float step_element(const Numbers& n, float grad, float weight, State& state) {
  if (n.maximize) {
    grad = -grad;
  }
  if (n.decay != 0.0) {
    if (n.decoupled) {
      weight *= static_cast<float>(1.0 - n.lr * n.decay);
    } else {
      grad = std::fma(static_cast<float>(n.decay), weight, grad);
    }
  }
  state.first = lerp(state.first, grad, 1.0 - n.beta1);
  state.second *= static_cast<float>(n.beta2);
  state.second = addcmul(state.second, grad, grad, 1.0 - n.beta2);
  float root = std::sqrt(state.second);
  if (n.amsgrad) {
    state.greatest = std::max(state.greatest, state.second);
    root = std::sqrt(state.greatest);
  }
  root = root / static_cast<float>(n.root2) + static_cast<float>(n.eps);
  return addcdiv(weight, state.first, root, n.step_size);
}

struct Gate {
  float inv_scale, coefficient, most;
  explicit Gate(const StepCase& c)
      : inv_scale(c.scales ? 0.125F : 1.0F),
        coefficient(c.clips ? 0.7F : 1.0F),
        most(c.clips ? 2.0F : INFINITY) {}
  float operator()(float grad) const {
    return std::clamp(grad * inv_scale * coefficient, -most, most);
  }
};

void step_entry(const kernels::StepEntry& entry, const Numbers& numbers, const StepCase& c) {
  const Gate amp_step(c);
  const auto tensor = [&](kernels::Slot slot) { return entry.tensors[slot]; };
  const at::Tensor& weights = *tensor(kernels::kWeight);
  const at::Tensor* const half = tensor(kernels::kHalf);
  const at::Tensor* const greatest = tensor(kernels::kMax);
  for (std::int64_t i = 0; i < weights.numel(); ++i) {
    const float grad = amp_step(element_of(*tensor(kernels::kGrad), i));
    if (c.writes) {
      set_element(*tensor(kernels::kGrad), i, grad);
    }
    if (c.skips) {
      continue;
    }
    float weight = element_of(weights, i);
    if (half != nullptr && !entry.half_is_copy) {
      const float parameter = element_of(*half, i);
      set_element(*half, i, weight);
      weight = element_of(*half, i) == parameter ? weight : parameter;
    }
    State state{element_of(*tensor(kernels::kFirst), i), element_of(*tensor(kernels::kSecond), i),
                greatest == nullptr ? 0.0F : element_of(*greatest, i)};
    weight = step_element(numbers, grad, weight, state);
    set_element(weights, i, weight);
    set_element(*tensor(kernels::kFirst), i, state.first);
    set_element(*tensor(kernels::kSecond), i, state.second);
    if (half != nullptr && half->scalar_type() == at::kFloat8_e4m3fn) {
      set_float8(*half, i, weight);
    } else if (half != nullptr) {
      set_element(*half, i, weight);
    }
    if (greatest != nullptr) {
      set_element(*greatest, i, state.greatest);
    }
  }
}

}  // namespace

AdamwGroups::AdamwGroups(const StepCase& c)
    : beta1(c.groups, 0.9), beta2(c.groups, 0.99), eps(c.groups, 1e-8) {
  for (std::size_t g = 0; g < c.groups; ++g) {
    lr.push_back(0.01 * static_cast<double>(g + 1));
    // The second one's first moments are rounded by noise, too, where others are.
    beta1[g] = std::array{0.9, 0.97, 0.3}.at(g % 3);
    // Zeros in the place of elements beyond the end step to NaN then, which must not be seen.
    eps[g] = g % 4 == 3 ? 0.0 : 1e-8;
    decay.push_back(g % 2 == 0 ? 0.01 : 0.0);
    decoupled.push_back(g % 4 < 2);
    amsgrad.push_back(c.amsgrad && g % 2 == 0);
    maximize.push_back(g % 5 == 3);
  }
}

void step_as_torch_on_cuda(const StepLists& lists, const StepCase& c) {
  const AdamwGroups groups(c);
  for (const auto& entry : lists.entries(true, c)) {
    const at::Tensor& steps = *entry.tensors[kernels::kStep];
    step_entry(entry, Numbers(groups, entry.group, value_of(steps)), c);
    if (!c.skips) {
      set_element(steps, 0, value_of(steps) + 1.0F);
    }
  }
}

}  // namespace fastamp::test
