// SPDX-License-Identifier: Apache-2.0
// Lets clang's libFuzzer look for archives and dicts that a C++ reader mishandles: it follows which
// branches of the library run. docs/testing.md says how it is built. With a reader's name:
//
//   FASTAMP_READER=... fastamp_fuzz_archives -max_total_time=600 -max_len=64
//
// A find is written to crash-* in the current folder; once mended, it goes to tests/data/archives,
// where test_archives.cpp reads it.

#include "nets/archives.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>

using fastamp::test::Case;
using fastamp::test::Reader;
using fastamp::test::readers;

namespace {

const Reader& chosen() {
  const char* const name = std::getenv("FASTAMP_READER");
  const auto found = readers().find(name == nullptr ? "" : name);
  if (found != readers().end()) {
    return found->second;
  }
  std::cerr << "FASTAMP_READER: expected one of";
  for (const auto& reader : readers()) {
    std::cerr << ' ' << reader.first;
  }
  std::cerr << ", got " << (name == nullptr ? "none" : name) << '\n';
  std::exit(2);
}

}  // namespace

/// An exception ends the program, and libFuzzer writes down the case.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Reader& read = chosen();
  read(Case(data, data + size));
  return 0;
}
