#include "optim/adam_state.h"

#include "optim/checkpoint.h"

namespace fastamp::optim {

void AdamParamState::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(read_counter(steps())));
  write_tensor(archive, "exp_avg", exp_avg());
  write_tensor(archive, "exp_avg_sq", exp_avg_sq());
  write_tensor(archive, "max_exp_avg_sq", max_exp_avg_sq());
  write_tensor(archive, "master", master());
}

void AdamParamState::serialize(torch::serialize::InputArchive& archive) {
  const auto count = read_entry(archive, "Adam::load", "step").toInt();
  steps(counter_on(c10::kCPU, static_cast<double>(count)));
  exp_avg(read_tensor(archive, "exp_avg"));
  exp_avg_sq(read_tensor(archive, "exp_avg_sq"));
  max_exp_avg_sq(read_tensor(archive, "max_exp_avg_sq"));
  master(read_tensor(archive, "master"));
}

void fit_adam_state(const char* function, AdamParamState& state, const at::Tensor& param,
                    c10::ScalarType dtype) {
  state.exp_avg(fitted(function, "exp_avg", state.exp_avg(), param, dtype));
  state.exp_avg_sq(fitted(function, "exp_avg_sq", state.exp_avg_sq(), param, dtype));
  state.max_exp_avg_sq(fitted(function, "max_exp_avg_sq", state.max_exp_avg_sq(), param, dtype));
  state.master(fitted(function, "master", state.master(), param, at::kFloat));
  state.steps(counter_for(param, static_cast<double>(read_counter(state.steps()))));
}

bool no_adam_state(const torch::optim::OptimizerParamState& state) {
  return !static_cast<const AdamParamState&>(state).exp_avg().defined();
}

}  // namespace fastamp::optim
