// SPDX-License-Identifier: Apache-2.0
#include "scaler/call_step.h"

#include <fastamp/autocast/weights_changed.h>
#include <fastamp/optim/adam.h>
#include <fastamp/optim/adamw.h>
#include <fastamp/optim/muon.h>
#include <fastamp/optim/sgd.h>

#include <typeinfo>

namespace fastamp::scaler {
namespace {

using torch::optim::Optimizer;

/// Exactly fastamp's: a derived class may have a step() of its own.
bool moves_versions(const Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  return type == typeid(optim::SGD) || type == typeid(optim::Adam) ||
         type == typeid(optim::AdamW) || type == typeid(optim::Muon);
}

class WeightsChangedAtEnd {
 public:
  explicit WeightsChangedAtEnd(const Optimizer& optimizer) : optimizer_(optimizer) {}
  ~WeightsChangedAtEnd() { weights_changed(optimizer_); }
  WeightsChangedAtEnd(const WeightsChangedAtEnd&) = delete;
  WeightsChangedAtEnd& operator=(const WeightsChangedAtEnd&) = delete;

 private:
  const Optimizer& optimizer_;
};

}  // namespace

at::Tensor call_step(Optimizer& optimizer, const Optimizer::LossClosure& closure) {
  if (moves_versions(optimizer)) {
    return optimizer.step(closure);
  }
  const WeightsChangedAtEnd changed(optimizer);
  if (!closure) {
    return optimizer.step();
  }
  return optimizer.step([&] {
    weights_changed(optimizer);
    return closure();
  });
}

}  // namespace fastamp::scaler
