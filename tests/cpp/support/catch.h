#pragma once

/// Catch2 v2 (one header) or v3 under one name. Tests keep to what both have: TEST_CASE, SECTION,
/// GENERATE, TEMPLATE_TEST_CASE, CHECK*, REQUIRE*, Approx, INFO, CAPTURE.

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
