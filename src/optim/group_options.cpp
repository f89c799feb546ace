// SPDX-License-Identifier: Apache-2.0
#include "optim/group_options.h"

#include <torch/optim/sgd.h>

namespace fastamp::optim {

bool groups_inherit() {
  static const bool inherit = [] {
    using torch::optim::SGDOptions;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{}, std::make_unique<SGDOptions>(0.5));
    const torch::optim::SGD probe(groups, SGDOptions(0.5).momentum(0.25));
    const auto& options = static_cast<const SGDOptions&>(probe.param_groups()[0].options());
    return options.momentum() == 0.25;
  }();
  return inherit;
}

void check_parameters(const char* function, const torch::optim::OptimizerParamGroup& group) {
  for (std::size_t i = 0; i < group.params().size(); ++i) {
    TORCH_CHECK_VALUE(group.params()[i].defined(), function,
                      ": expected defined tensors as parameters, got an undefined one at position ",
                      i, " of its group");
  }
}

}  // namespace fastamp::optim
