// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace fastamp::optim {

/// Factor of the learning rate of a matrix, by its shape, in Muon.
enum class MuonRate : std::uint8_t {
  kOriginal,           ///< sqrt(max(1, rows / columns)).
  kMatchRmsAdamW,      ///< 0.2 * sqrt(max(rows, columns)): rates and decays tuned for AdamW fit.
  kNone,               ///< 1.
  kSpectralUnclamped,  ///< sqrt(rows / columns), also below 1: torch.optim.Muon's from 2.14 on.
};

}  // namespace fastamp::optim
