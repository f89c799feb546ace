#pragma once

#include "gather.h"
#include "scaler/gradient_groups.h"

#include <vector>

namespace fastamp::python {

/// Gradients gathered for Python: those C++ can work on, and the parameters of all others.
struct GradientList {
  std::vector<scaler::DeviceGradients> groups;
  Parameters foreign;   ///< Parameters whose gradients are Python tensor subclasses.
  bool shared = false;  ///< Of an optimizer: two parameters may have one gradient.
};

}  // namespace fastamp::python
