// SPDX-License-Identifier: Apache-2.0
#include "faults/every_allocation.h"

#include "faults/failing_memory.h"
#include "support/autocast_state.h"
#include "support/catch.h"

#include <c10/util/Exception.h>

#include <cstddef>
#include <exception>
#include <string>

namespace fastamp::test {

Seen& Seen::add(const at::Tensor& tensor) {
  tensors.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  return *this;
}

Seen& Seen::add(const std::string& line) {
  text += line + "\n";
  return *this;
}

std::string Seen::difference(const Seen& other) const {
  if (text != other.text) {
    return text + " became " + other.text;
  }
  if (tensors.size() != other.tensors.size()) {
    return "number of tensors";
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& a = tensors[i];
    const auto& b = other.tensors[i];
    if (a.defined() != b.defined() || (a.defined() && !bit_equal(a, b))) {
      return "tensor " + std::to_string(i);
    }
  }
  return "";
}

int fail_every_allocation(const std::function<Subject()>& make) {
  const auto state = public_state();
  auto reference = make();
  reference.call();  // Also what is made once in a process.
  auto again = make();
  again.call();
  const auto expected = again.look();
  for (int before = 0;; ++before) {
    CAPTURE(before);
    const auto subject = make();
    const auto found = subject.look();
    bool failed = false;
    bool happened = false;
    std::string message;
    {
      const FailingAllocation failing(before);
      try {
        subject.call();
      } catch (const std::exception& error) {
        failed = true;
        message = error.what();
      }
      happened = FailingAllocation::happened();
    }
    CAPTURE(message);
    REQUIRE(public_state() == state);
    if (failed) {
      REQUIRE(happened);
      CHECK(found.difference(subject.look()) == "");
      subject.call();
    }
    CHECK(expected.difference(subject.look()) == "");
    if (!happened) {
      return before;
    }
  }
}

}  // namespace fastamp::test
