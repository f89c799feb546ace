// SPDX-License-Identifier: Apache-2.0
#include "core/tensor_lists.h"
#include "support/catch.h"

#include <ATen/ops/ones.h>

#include <cstddef>
#include <random>
#include <unordered_set>
#include <vector>

using fastamp::PointerSet;
using fastamp::RepeatFinder;

namespace {

/// A list that keeps a reference to each of its tensors, and takes none twice.
struct DistinctList {
  std::vector<at::Tensor> tensors;
  RepeatFinder finder;
  bool looked_up = false;

  bool add(const at::Tensor& tensor) {
    const bool again =
        finder.comes_again(tensor, tensor.unsafeGetTensorImpl(), [this](PointerSet& known) {
          looked_up = true;
          for (const auto& listed : tensors) {
            known.insert(listed.unsafeGetTensorImpl());
          }
        });
    if (!again) {
      tensors.push_back(tensor);
    }
    return !again;
  }
};

std::vector<at::Tensor> some_tensors(std::size_t count) {
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < count; ++i) {
    tensors.push_back(at::ones({1}));
  }
  return tensors;
}

}  // namespace

TEST_CASE("PointerSet: as std::unordered_set, while it grows", "[core]") {
  std::mt19937 random(7);
  for (const std::size_t range : {10UL, 1000UL, 100000UL}) {
    const std::vector<double> memory(range);
    std::uniform_int_distribution<std::size_t> any(0, range - 1);
    PointerSet set;
    std::unordered_set<const void*> expected;
    for (int i = 0; i < 20000; ++i) {
      const void* const pointer = &memory[any(random)];
      REQUIRE(set.insert(pointer) == expected.insert(pointer).second);
    }
  }
}

TEST_CASE("RepeatFinder: whatever holds tensors, each is taken once", "[core]") {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    const auto tensors = some_tensors(1 + random() % 100);
    const auto holders = random() % 3;  // None, a few, or up to two of each.
    std::vector<at::Tensor> held;
    for (const auto& tensor : tensors) {
      const auto copies = holders == 0   ? 0
                          : holders == 1 ? std::size_t(random() % 20 == 0)
                                         : random() % 3;
      held.insert(held.end(), copies, tensor);
    }
    DistinctList list;
    std::unordered_set<const void*> expected;
    const auto repeats = random() % 3;
    for (std::size_t i = 0; i < tensors.size() + repeats; ++i) {
      const auto& tensor = tensors[i < tensors.size() ? i : random() % tensors.size()];
      REQUIRE(list.add(tensor) == expected.insert(tensor.unsafeGetTensorImpl()).second);
      if (random() % 50 == 0) {
        const auto& early = tensors[random() % tensors.size()];
        REQUIRE(list.add(early) == expected.insert(early.unsafeGetTensorImpl()).second);
      }
    }
    CHECK(list.tensors.size() == expected.size());
  }
}

TEST_CASE("RepeatFinder: tensors that are held alike are not looked up", "[core]") {
  const auto tensors = some_tensors(50);
  const auto held = GENERATE(false, true) ? tensors : std::vector<at::Tensor>{};
  DistinctList list;
  for (const auto& tensor : tensors) {
    CHECK(list.add(tensor));
  }
  CHECK_FALSE(list.looked_up);
  CHECK_FALSE(list.add(tensors.back()));
  CHECK(list.looked_up);
}
