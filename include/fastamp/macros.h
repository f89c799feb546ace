// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks a symbol of libfastamp that programs may link against; everything else is hidden.
#define FASTAMP_API __attribute__((visibility("default")))
