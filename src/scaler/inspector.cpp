// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_kind.h"
#include "core/text.h"

#include <fastamp/scaler/inspector.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>

namespace fastamp {
namespace {

bool is_counted(const at::Tensor& gradient) {
  return gradient.defined() && is_ordinary(gradient) && gradient.layout() == at::kStrided &&
         (gradient.scalar_type() == at::kFloat || gradient.scalar_type() == at::kHalf ||
          gradient.scalar_type() == at::kBFloat16);
}

double norm_of(const at::Tensor& tensor) {
  return at::linalg_vector_norm(tensor.to(at::kDouble)).item<double>();  // sync: for the host
}

}  // namespace

Inspector::Inspector(const torch::OrderedDict<std::string, at::Tensor>& named_parameters) {
  for (const auto& item : named_parameters) {
    TORCH_CHECK_VALUE(item.value().defined(), "Inspector: expected parameter ", item.key(),
                      " to be a tensor, got an undefined one");
    names_.push_back(item.key());
    parameters_.push_back(item.value());
  }
}

void Inspector::after_backward(double scale) {
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale > 0.0,
                    "after_backward: expected scale to be a finite number above 0, got ", scale);
  const at::NoGradGuard no_grad;
  scale_ = scale;
  all_ = NumberRange();
  noted_.clear();
  gradients_.clear();
  weights_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& gradient = parameters_[i].grad();
    if (!is_counted(gradient)) {
      continue;
    }
    auto range = NumberRange::of(gradient);
    all_ += range;
    gradients_.push_back(
        {.name = names_[i], .dtype = gradient.scalar_type(), .range = std::move(range)});
    noted_.push_back({.parameter = i,
                      .weight = parameters_[i].detach().clone(),
                      .moved = gradient.detach() != 0});
  }
}

void Inspector::after_step() {
  TORCH_CHECK(!noted_.empty() || parameters_.empty() || !gradients_.empty(),
              "after_step: expected after_backward() before it, with gradients, got none");
  const at::NoGradGuard no_grad;
  weights_.clear();
  for (const auto& noted : noted_) {
    const auto after = parameters_[noted.parameter].detach();
    const auto kept = noted.weight == after;
    const auto moved = noted.moved.sum().item<double>();             // sync: for the host
    const auto stalled = (kept & noted.moved).sum().item<double>();  // sync: the same
    const double weight = norm_of(noted.weight);
    const double update = norm_of(after.to(at::kDouble) - noted.weight.to(at::kDouble));
    const double still = update == 0.0 ? 0.0 : std::numeric_limits<double>::infinity();
    weights_.push_back({.name = names_[noted.parameter],
                        .dtype = after.scalar_type(),
                        .stalled = stalled / std::max(moved, 1.0),
                        .update = weight == 0.0 ? still : update / weight});
  }
}

double Inspector::share_of_zeros(double other) const {
  TORCH_CHECK_VALUE(std::isfinite(other) && other > 0.0,
                    "share_of_zeros: expected other to be a finite number above 0, got ", other);
  return all_.share_of_zeros(at::kHalf, std::lround(std::log2(other / scale_)));
}

double Inspector::largest_scale() const {
  const auto shift = all_.largest_shift(at::kHalf);
  return shift ? std::ldexp(scale_, static_cast<int>(*shift)) : 0.0;
}

std::string Inspector::str() const {
  constexpr double kPercent = 100.0;
  constexpr int kDigits = 4;
  auto text = new_text(kDigits);
  text << "Gradients at scale " << scale_ << ": " << kPercent * share_of_zeros(scale_)
       << " % are 0";
  if (const double largest = largest_scale(); largest > 0.0) {
    text << "; finite in fp16 up to scale " << largest;
  }
  for (const auto& gradient : gradients_) {
    const auto& range = gradient.range;
    text << "\n  " << gradient.name << "  " << gradient.dtype << "  greatest " << range.greatest()
         << "  least " << range.least() << "  zeros " << kPercent * range.share_of_zeros(at::kHalf)
         << " %  subnormal in fp16 " << kPercent * range.share_of_subnormals(at::kHalf) << " %";
    if (range.inf() + range.nan() != 0) {
      text << "  inf " << range.inf() << "  NaN " << range.nan();
    }
  }
  if (!weights_.empty()) {
    text << "\nWeights";
  }
  for (const auto& weight : weights_) {
    text << "\n  " << weight.name << "  " << weight.dtype << "  stalled "
         << kPercent * weight.stalled << " %  |update|/|weight| " << weight.update;
  }
  return text.str();
}

std::ostream& operator<<(std::ostream& out, const Inspector& inspector) {
  return out << inspector.str();
}

}  // namespace fastamp
