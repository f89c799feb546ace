// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

/// TORCH_ARG for an option that LibTorch's options have already, in a class that derives from them
/// and calls them `Torch`: the setter returns the derived class, so that a chain of calls can go on
/// with options that only the derived class has.
#define FASTAMP_TORCH_ARG(T, name)                         \
  auto name(T value) -> decltype(*this) { /* NOLINT */     \
    Torch::name(std::move(value));                         \
    return *this;                                          \
  }                                                        \
  const T& name() const noexcept { return Torch::name(); } \
  T& name() noexcept { return Torch::name(); }
