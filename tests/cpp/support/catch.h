// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Catch2 v2 (one header) or v3 under one name. Tests keep to what both have: TEST_CASE, SECTION,
/// GENERATE, TEMPLATE_TEST_CASE, CHECK*, REQUIRE*, Approx, INFO, CAPTURE.

// c10's logging has a CHECK of its own, which stops the process. Included here so that no later
// include can bring it back over Catch2's.
#include <c10/util/Logging.h>
#undef CHECK

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
