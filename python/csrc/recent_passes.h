// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "scaler/gradient_pass.h"

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace fastamp::python {

/// Passes of unscale_ whose gradients may still be as the pass left them: fastamp.clip_grad_norm_,
/// which knows of no scaler, takes their norms. A pass holds its gradients only until the step, so
/// one without them matches nothing. Guarded by the GIL.
class RecentPasses {
 public:
  /// The process's only one. Never destroyed: daemon threads may be at work while it exits.
  static RecentPasses& get();

  void remember(const std::shared_ptr<scaler::PassResult>& pass);

  /// The norm of gradients that some of the passes hold, unchanged and together exactly them.
  std::optional<at::Tensor> norm_of(const std::vector<scaler::DeviceGradients>& gradients,
                                    at::ScalarType dtype) const;

 private:
  std::array<std::weak_ptr<const scaler::PassResult>, 4> passes_;
  std::size_t next_ = 0;
};

}  // namespace fastamp::python
