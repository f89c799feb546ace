// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fastamp/autocast/float8.h>
#include <fastamp/macros.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>

// Checked recipes, and the default of the process. Which recipe is in force on a thread is asked
// through autocast/float8_interface.h. Exported for the Python module; not part of the public API.
namespace fastamp::autocast {

/// The ops that a recipe can run in fp8: bits of Float8Setting::ops.
enum class Float8Op : std::uint8_t { linear, addmm, mm, matmul };
FASTAMP_API std::string_view to_string(Float8Op op);

/// A checked recipe and the base dtype of its region. Interned: equal ones are one object, which is
/// never destroyed.
struct Float8Setting {
  c10::ScalarType base_dtype = c10::ScalarType::Undefined;
  c10::ScalarType forward_dtype = c10::ScalarType::Undefined;
  c10::ScalarType grad_dtype = c10::ScalarType::Undefined;
  Float8Recipe::FastAccumulate fast_accumulate{};
  std::uint8_t ops = 0;
  std::optional<Float8Recipe::Size> small_size;
  std::uint32_t number = 0;  ///< For Python, which holds numbers; never 0.

  bool operator==(const Float8Setting&) const = default;

  bool runs(Float8Op op) const { return ((unsigned{ops} >> static_cast<unsigned>(op)) & 1U) != 0; }
};

/// @param function  The function that errors name as their source.
/// @throws c10::ValueError if the recipe or the base dtype is not possible.
FASTAMP_API const Float8Setting* float8_setting(const char* function, const Float8Recipe& recipe,
                                                c10::ScalarType base_dtype);

/// The setting with this number; null for 0.
FASTAMP_API const Float8Setting* float8_setting_numbered(std::uint32_t number);

FASTAMP_API Float8Recipe recipe_of(const Float8Setting& setting);

/// Makes regions on the device that have no setting of their own follow this one, in the whole
/// process: that is how programs that know nothing of fp8 run in it. Null ends that.
FASTAMP_API void set_default_float8(c10::DeviceType device, const Float8Setting* setting) noexcept;

/// Counts of what ops that can run in fp8 have met since a device got its default.
struct DefaultFloat8Use {
  bool acted = false;        ///< Some were in a region that follows the default or its own recipe.
  bool met_float16 = false;  ///< Some were in one that would follow the default, but has float16.
};

/// Asked when a program ends, to say whether its default did anything.
FASTAMP_API DefaultFloat8Use default_float8_use(c10::DeviceType device) noexcept;

/// Setting of a region that refuses the default: a setting of no base dtype, which is never in
/// force. Null while the device has no default.
FASTAMP_API const Float8Setting* no_float8(c10::DeviceType device) noexcept;

/// Makes regions on the device whose dtype is bfloat16 and that have no recipe of their own
/// follow this one, in the whole process: see set_default_float8(). On a GPU or in a build without
/// fp8 products it warns and changes nothing. That fp8 is slow on the CPU is said when it runs.
/// @throws c10::ValueError if the device or the recipe is not possible.
FASTAMP_API void start_default_float8(const char* function, c10::DeviceType device,
                                      const Float8Recipe& recipe);

}  // namespace fastamp::autocast
