// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "autocast/float8_gpu.h"

#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/float8_plan.h>
#include <fastamp/export.h>

#include <c10/core/ScalarType.h>

#include <cstdint>

// How long the products of a linear layer take in the carrier and in fp8: a model of a GPU, with
// the constants of float8_constants.h. Exported for tests and for the Python module.
namespace fastamp::autocast {

struct Float8Prediction {
  double carrier_seconds;  ///< On the GPU, with the casts that a 16-bit region makes.
  double float8_seconds;   ///< On the GPU, with the casts to fp8.
  /// How many times as fast fp8 is. Their quotient; but where the products are so small that the
  /// GPU waits for launches, that of the numbers of launches, if it is less.
  double gain;
};

/// Takes a few hundred cycles: nothing is remembered from call to call. The same arguments give the
/// same answer in every process. Sizes are positive.
FASTAMP_API Float8Prediction predict_float8(const Float8Gpu& gpu, const Float8Shape& shape,
                                            c10::ScalarType carrier,
                                            Float8Scale scale = Float8Scale::current);

/// FLOP of [rows, depth] times [depth, columns] as the model counts them: with the share of the
/// last wave's idle time that is not hidden.
FASTAMP_API double float8_product_work(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                                       int multiprocessors);

}  // namespace fastamp::autocast
