// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace fastamp::test {

using Params = std::vector<at::Tensor>;

/// Leaves of several sizes (a scalar, an empty one and a transposed one among them).
inline Params make_params(at::ScalarType dtype = at::kFloat) {
  Params params;
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{33}, {}, {5, 7}, {0}, {300}}) {
    params.push_back(at::randn(shape).to(dtype).requires_grad_(true));
  }
  params.push_back(at::randn({6, 4}).t().to(dtype).requires_grad_(true));
  return params;
}

inline Params copy_of(const Params& params) {
  Params copies;
  for (const auto& param : params) {
    copies.push_back(param.detach().clone().requires_grad_(true));
  }
  return copies;
}

/// Gives both lists the same random gradients; one parameter in eight gets none.
inline void set_gradients(const std::vector<Params*>& lists, double size = 1.0) {
  for (std::size_t i = 0; i < lists.front()->size(); ++i) {
    const at::Tensor& like = (*lists.front())[i];
    const bool none = at::randn({}).item<float>() > 1.15F;
    const auto gradient = at::randn(like.sizes()).mul(size).to(like.scalar_type());
    for (auto* list : lists) {
      (*list)[i].mutable_grad() = none ? at::Tensor() : gradient.clone();
    }
  }
}

inline bool equal(const Params& left, const Params& right) {
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (!left[i].equal(right[i])) {
      return false;
    }
  }
  return left.size() == right.size();
}

/// The largest difference, in units of fp32's precision at 1 (2^-23).
inline double difference(const Params& left, const Params& right) {
  double worst = 0.0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i].numel() > 0) {
      const auto gap = (left[i].detach().to(at::kDouble) - right[i].detach().to(at::kDouble)).abs();
      worst = std::max(worst, gap.max().item<double>() * 8388608.0);
    }
  }
  return worst;
}

/// Two groups: the first `split` parameters with their own options, the others with the defaults.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> two_groups(const Params& params,
                                                          const Options& first) {
  const auto split = params.begin() + 2;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Params(params.begin(), split), std::make_unique<Options>(first));
  groups.emplace_back(Params(split, params.end()));
  return groups;
}

template <typename From, typename To>
void transfer(const From& from, To& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace fastamp::test
