// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "float8/recipe.h"

#include <fastamp/export.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

// What a region checks before it puts a recipe in force, in C++ and in Python.
namespace fastamp::autocast {

/// The setting of a region with this recipe and carrier. Null, after a warning, on a GPU or in a
/// build that has no fp8 products: the region then runs in its carrier. On the CPU it warns, once,
/// that fp8 is slow there.
/// @param function  The function that errors and warnings name as their source.
/// @throws c10::ValueError if the device, the recipe or the carrier is not possible.
FASTAMP_API const Float8Setting* float8_of_region(const char* function, c10::DeviceType device,
                                                  const Float8Recipe& recipe,
                                                  c10::ScalarType carrier);

/// From now on, regions on the device whose dtype is bfloat16 and that have no recipe of their own
/// follow this one, in the whole process: see set_default_float8(). On a GPU or in a build without
/// fp8 products it warns and changes nothing. That fp8 is slow on the CPU is said when it runs.
/// @throws c10::ValueError if the device or the recipe is not possible.
FASTAMP_API void start_default_float8(const char* function, c10::DeviceType device,
                                      const Float8Recipe& recipe);

/// @throws c10::ValueError if a region's dtype is an fp8 format other than float8_e4m3fn, the one
///     that stands for a default recipe.
FASTAMP_API void check_float8_dtype(const char* function, c10::ScalarType dtype);

}  // namespace fastamp::autocast
