#include "scaler/step_notes.h"

#include "core/repeat_finder.h"
#include "core/tensor_kind.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace fastamp::scaler {
namespace {

constexpr std::int64_t kSkipsBeforeWarning = 20;

void append_rows(OverflowReport& report, const OptimizerRecord& record,
                 const NonFiniteCounts& counts,
                 const std::unordered_map<const void*, std::string>& names) {
  const auto host = counts.counts.cpu();  // sync: the report is asked for, seldom
  const auto rows = host.accessor<std::int64_t, 2>();
  for (std::size_t i = 0; i < counts.positions.size(); ++i) {
    const auto row = rows[static_cast<std::int64_t>(i)];
    if (row[0] == 0 && row[1] == 0) {
      continue;
    }
    NonFiniteGradient gradient;
    gradient.index = counts.positions[i];
    gradient.name = "parameter " + std::to_string(gradient.index);
    gradient.inf = row[0];
    gradient.nan = row[1];
    if (gradient.index < record.parameters.size()) {
      if (const auto parameter = record.parameters[gradient.index].lock()) {
        if (has_geometry(at::Tensor(parameter))) {
          gradient.shape = parameter->sizes().vec();
        }
        const auto name = names.find(parameter.get());
        gradient.name = name != names.end() ? name->second : gradient.name;
      }
    }
    report.gradients.push_back(std::move(gradient));
  }
}

}  // namespace

bool OptimizerRecord::recognises(const torch::optim::Optimizer& optimizer) const {
  PointerSet known;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      // A weak reference keeps the address: no other parameter can come to have it.
      const void* const address = parameter.unsafeGetTensorImpl();
      if (parameters.empty() || parameters.front()._unsafe_get_target() == address) {
        return true;  // So it ends at the first parameter, nearly always.
      }
      known.insert(address);
    }
  }
  return parameters.empty() || std::ranges::any_of(parameters, [&](const WeakTensor& parameter) {
           return !known.insert(parameter._unsafe_get_target());
         });
}

bool OptimizerRecord::is_orphaned() const {
  return !parameters.empty() && std::ranges::all_of(parameters, [](const WeakTensor& parameter) {
    return parameter.expired();
  });
}

std::optional<PassResult> OptimizerRecord::start_iteration() {
  stage = Stage::kReady;
  first_pass = 0;
  read_only = false;
  agreed_flag = at::Tensor();
  norm = at::Tensor();
  clip_coef = at::Tensor();
  clip_value.reset();
  return std::exchange(pass, std::nullopt);
}

void OptimizerRecord::end_step() {
  stage = Stage::kStepped;
  if (pass) {
    pass->forget();
  }
}

std::vector<at::Tensor> OptimizerRecord::flags() const {
  std::vector<at::Tensor> result;
  if (pass) {
    for (const auto& device : pass->devices()) {
      result.push_back(device.found_inf);
    }
  }
  if (result.empty() && agreed_flag.defined()) {
    result.push_back(agreed_flag);
  }
  return result;
}

at::Tensor OptimizerRecord::known_norm() const {
  if (norm.defined()) {
    return norm;
  }
  return pass && pass->has_norm() ? pass->total_norm(at::kFloat) : at::Tensor();
}

void StepNotes::expect(const at::Tensor& scale, const std::vector<Outcome>& outcomes) {
  std::vector<at::Tensor> scalars{scale};
  for (const auto& outcome : outcomes) {
    scalars.insert(scalars.end(), outcome.flags.begin(), outcome.flags.end());
  }
  pending_.push_back({.number = iterations_, .outcomes = outcomes, .readback = Readback(scalars)});
  iterations_ += outcomes.empty() ? 0 : 1;
  settle(/*wait=*/false);
}

void StepNotes::settle(bool wait) {
  while (!pending_.empty() && (wait || pending_.front().readback.ready())) {
    auto iteration = std::move(pending_.front());
    pending_.pop_front();
    take_in(iteration);
  }
}

void StepNotes::take_in(Iteration& iteration) {
  const auto values = iteration.readback.values();
  const double before = std::exchange(scale_, values.front());
  auto flag = values.begin() + 1;
  Overflow overflow{.number = iteration.number, .scale = before, .optimizers = {}};
  for (const auto& outcome : iteration.outcomes) {
    const auto end = flag + static_cast<std::ptrdiff_t>(outcome.flags.size());
    // NaN is not 0 either: any non-zero flag is an overflow.
    outcome.record->skipped = std::any_of(flag, end, [](double value) { return value != 0.0; });
    flag = end;
    if (outcome.record->skipped) {
      overflow.optimizers.emplace_back(outcome.record, outcome.counts);
    }
  }
  if (iteration.outcomes.empty()) {
    return;
  }
  skipped_ = !overflow.optimizers.empty();
  skipped_in_a_row_ = skipped_ ? skipped_in_a_row_ + 1 : 0;
  if (skipped_) {
    overflow_ = std::move(overflow);
    warn(before);
  }
}

void StepNotes::warn(double before) {
  const bool small = scale_ < 1.0 && before >= 1.0;
  if (warned_ || (!small && skipped_in_a_row_ < kSkipsBeforeWarning)) {
    return;
  }
  warned_ = true;
  std::ostringstream what;
  if (small) {
    what << "the loss scale fell below 1 (to " << scale_ << ")";
  } else {
    what << skipped_in_a_row_ << " steps in a row were skipped";
  }
  TORCH_WARN("GradScaler: ", what.str(),
             ", so gradients are inf or NaN for a reason that a smaller scale does not cure. Look "
             "at overflow_report(model->named_parameters()) for the parameters concerned, at the "
             "loss and the inputs of that step for NaN, and at history() for when it began; a "
             "learning rate that is too high, a division by zero and a log or sqrt of zero are "
             "common causes.");
}

OverflowReport StepNotes::report(const std::unordered_map<const void*, std::string>& names) const {
  if (overflow_.number < 0) {
    return loaded_report_;
  }
  OverflowReport report;
  report.step = overflow_.number;
  report.scale = overflow_.scale;
  for (const auto& [record, counts] : overflow_.optimizers) {
    for (const auto& device : counts) {
      if (device) {
        append_rows(report, *record, *device, names);
      }
    }
  }
  return report;
}

}  // namespace fastamp::scaler
