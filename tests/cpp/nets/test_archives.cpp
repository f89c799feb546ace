// SPDX-License-Identifier: Apache-2.0
// Archives and dicts that are read from outside, damaged: taken, or refused with an error that
// changes nothing. tests/python/nets/files.py is the same for Python.

#include "nets/archives.h"
#include "support/catch.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <utility>

using fastamp::test::Case;
using fastamp::test::readers;

namespace {

constexpr int kCases = 150;  // of each reader in a round

int rounds() {
  const char* const seeds = std::getenv("SEEDS");
  return seeds == nullptr ? 1 : std::max(1, std::atoi(seeds));
}

std::string text_of(const Case& bytes) {
  std::string text = "{";
  for (const int byte : bytes) {
    text += std::to_string(byte) + ", ";
  }
  return text + "}";
}

Case drawn(std::mt19937& draw) {
  Case bytes(3 + draw() % 40);
  std::ranges::generate(bytes, [&] { return static_cast<std::uint8_t>(draw()); });
  return bytes;
}

}  // namespace

TEST_CASE("archives: what was a fault once, and valid ones", "[nets]") {
  for (const auto& [name, read] : readers()) {
    CHECK(read({}));
    const auto folder = std::filesystem::path(FASTAMP_TEST_DATA) / "archives" / name;
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      CAPTURE(file.path());
      std::ifstream stream(file.path(), std::ios::binary);
      const Case bytes{std::istreambuf_iterator<char>(stream), {}};
      CHECK_NOTHROW(read(bytes));
    }
  }
}

TEST_CASE("archives: damaged ones are taken or refused, and refused ones change nothing",
          "[nets]") {
  for (const auto& [name, read] : readers()) {
    int taken = 0;
    for (int seed = 0; seed < rounds(); ++seed) {
      std::mt19937 draw(static_cast<unsigned>(seed));
      for (int i = 0; i < kCases; ++i) {
        const auto bytes = drawn(draw);
        INFO("readers().at(\"" << name << "\")(" << text_of(bytes) << ")");
        try {
          taken += read(bytes) ? 1 : 0;
        } catch (const std::exception& error) {
          FAIL_CHECK(error.what());
        }
      }
    }
    const int all = kCases * rounds();
    CAPTURE(name, taken, all);
    CHECK(taken > all / 50);
    CHECK(taken < all - all / 50);
  }
}
