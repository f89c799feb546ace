#pragma once

#include <c10/core/DispatchKey.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

namespace fastamp::ops {

/// Registers ops or kernels and never takes them back: while the process exits, other threads may
/// still call them. fastamp is linked so that dlclose() leaves it where it is.
inline bool register_for_good(torch::Library::Kind kind, std::optional<c10::DispatchKey> key,
                              const char* file, std::uint32_t line,
                              void (*define)(torch::Library&)) {
  auto* library = new torch::Library(kind, "fastamp", key, file, line);
  define(*library);
  return true;
}

}  // namespace fastamp::ops

// As TORCH_LIBRARY(fastamp, m) and TORCH_LIBRARY_IMPL(fastamp, key, m), for good.
#define FASTAMP_SCHEMAS(m)                                                          \
  static void define_schemas(torch::Library&);                                      \
  [[maybe_unused]] static const bool g_schemas = ::fastamp::ops::register_for_good( \
      torch::Library::DEF, std::nullopt, __FILE__, __LINE__, define_schemas);       \
  static void define_schemas(torch::Library& m)
#define FASTAMP_KERNELS(key, m)                                                       \
  static void define_##key(torch::Library&);                                          \
  [[maybe_unused]] static const bool g_##key = ::fastamp::ops::register_for_good(     \
      torch::Library::IMPL, c10::DispatchKey::key, __FILE__, __LINE__, define_##key); \
  static void define_##key(torch::Library& m)
