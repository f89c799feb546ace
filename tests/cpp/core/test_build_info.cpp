// SPDX-License-Identifier: Apache-2.0
#include "support/catch.h"

#include <fastamp/build_info.h>
#include <fastamp/version.h>

#include <torch/version.h>

#include <string>

TEST_CASE("build_info: names the versions the library was compiled with", "[core]") {
  const auto info = fastamp::build_info();
  CHECK(info.version == FASTAMP_VERSION);
  CHECK(info.torch_version == TORCH_VERSION);
  CHECK_FALSE(info.compiler.empty());
}

TEST_CASE("build_info: a CUDA version comes with architectures, and only then", "[core]") {
  const auto info = fastamp::build_info();
  CHECK(info.cuda_version.empty() == info.cuda_archs.empty());
}

TEST_CASE("version: the parts make up the whole", "[core]") {
  const std::string joined = std::to_string(FASTAMP_VERSION_MAJOR) + "." +
                             std::to_string(FASTAMP_VERSION_MINOR) + "." +
                             std::to_string(FASTAMP_VERSION_PATCH);
  CHECK(joined == FASTAMP_VERSION);
}
