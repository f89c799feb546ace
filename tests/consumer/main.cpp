// A program of a user of fastamp: built against an installed fastamp and against its sources.
#include <fastamp/fastamp.h>

#include <iostream>

int main() {
  const auto info = fastamp::build_info();
  std::cout << "fastamp " << info.version << ", torch " << info.torch_version << '\n';
  return info.version == FASTAMP_VERSION && !info.torch_version.empty() ? 0 : 1;
}
