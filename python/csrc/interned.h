// SPDX-License-Identifier: Apache-2.0
#pragma once

// Names that dictionaries of Python find by their addresses.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

namespace fastamp::python {

/// A string literal that is an argument of a template.
template <std::size_t kSize>
struct Literal {
  // NOLINTNEXTLINE(*-explicit-*, *-avoid-c-arrays): as literals are.
  consteval Literal(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text.data()); }
  std::array<char, kSize> text{};
};

/// The interned string, never released; null with an error set if there is no memory for it.
///
/// Made at its first use, and not in an initializer: another thread that came here meanwhile would
/// wait in C++ where the interpreter cannot stop it, while the one that makes the string may be
/// waiting for the interpreter. Here both make it, which is the same string.
template <Literal kLiteral>
PyObject* interned_or_null() noexcept {
  static constinit std::atomic<PyObject*> known{nullptr};
  PyObject* string = known.load(std::memory_order_acquire);
  if (string == nullptr) [[unlikely]] {
    string = PyUnicode_InternFromString(kLiteral.text.data());
    known.store(string, std::memory_order_release);
  }
  return string;
}

/// Returns the string of a literal; it lives as long as the process.
/// @throws py::error_already_set  MemoryError.
template <Literal kLiteral>
PyObject* interned() {
  PyObject* const string = interned_or_null<kLiteral>();
  if (string == nullptr) [[unlikely]] {
    throw pybind11::error_already_set();
  }
  return string;
}

}  // namespace fastamp::python
