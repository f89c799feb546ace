// SPDX-License-Identifier: Apache-2.0
// Kept casts that a step writes are never seen half-written or out of date, in any order of what an
// optimizer, a region and an edit do. Each call of the store takes its lock, so the calls can be
// run one after the other: an order of calls is all that threads can make of them.
#include "autocast/kept_casts.h"
#include "optim/weight_copies.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace {

using fastamp::autocast::CopyingStep;
using fastamp::autocast::KeptCastStore;
using fastamp::autocast::WeightCopies;

constexpr auto kTo = c10::kBFloat16;
constexpr std::int64_t kSize = 8;

using Calls = std::vector<std::function<void()>>;

/// Runs the calls of some threads in every order that keeps each thread's own.
/// @param make  Makes the threads' calls, and what they share, anew for each order.
/// @param check  Called after each order.
/// @return How many orders there are.
std::size_t for_every_order(const std::function<std::vector<Calls>()>& make,
                            const std::function<void()>& check) {
  std::vector<std::size_t> order;
  auto threads = make();
  for (std::size_t i = 0; i < threads.size(); ++i) {
    order.insert(order.end(), threads[i].size(), i);
  }
  std::size_t orders = 0;
  do {
    threads = make();
    std::vector<std::size_t> next(threads.size(), 0);
    for (const std::size_t thread : order) {
      threads[thread][next[thread]++]();
    }
    check();
    ++orders;
  } while (std::ranges::next_permutation(order).found);
  return orders;
}

bool is_whole(const at::Tensor& tensor) {
  return tensor.eq(tensor.flatten()[0]).all().item<bool>();
}

/// Writes one half as a kernel does, which moves no version.
template <class T>
void write_half(const at::Tensor& tensor, int half, float value) {
  auto* const data = tensor.mutable_data_ptr<T>() + half * kSize / 2;
  std::fill(data, data + kSize / 2, static_cast<T>(value));
}

/// A weight of 1 with a kept cast; a step is to make it 2.
struct Scene {
  at::Tensor weight = at::full({1, kSize}, 1.0F, at::kFloat).requires_grad_();
  fastamp::KeepCastsGuard kept{{weight}};
  WeightCopies copies;
  CopyingStep step{&copies};
  at::Tensor copy;
  at::Tensor found;  ///< By the region.
  at::Tensor as_found;

  Scene() {
    const fastamp::AutocastGuard region(c10::kCPU, kTo);
    at::mm(at::ones({1, 1}), weight);
  }
};

Calls optimizer(const std::shared_ptr<Scene>& scene) {
  return {
      [=] { scene->copy = scene->step.open(scene->weight, kTo); },
      [=] { write_half<float>(scene->weight, 0, 2); },
      [=] {
        write_half<float>(scene->weight, 1, 2);
        scene->weight.unsafeGetTensorImpl()->bump_version();
      },
      [=] {
        if (scene->copy.defined()) {
          write_half<c10::BFloat16>(scene->copy, 0, 2);
        }
      },
      [=] {
        if (scene->copy.defined()) {
          write_half<c10::BFloat16>(scene->copy, 1, 2);
          scene->copy.unsafeGetTensorImpl()->bump_version();
        }
      },
      [=] {
        scene->copy = at::Tensor();
        scene->step.finish();
      },
  };
}

/// Finds the cast, saves it for backward, and uses it again later.
Calls region(const std::shared_ptr<Scene>& scene) {
  return {
      [=] {
        scene->found = KeptCastStore::instance().find(scene->weight, kTo);
        if (scene->found.defined()) {
          scene->as_found = scene->found.clone();
          CHECK(is_whole(scene->found));
        }
      },
      [=] {
        if (scene->found.defined()) {
          CHECK(scene->found.equal(scene->as_found));
        }
      },
  };
}

/// Makes the cast that it does not find, keeps it and uses an alias of it, as make_cast() does.
Calls making_region(const std::shared_ptr<Scene>& scene) {
  const auto made = std::make_shared<at::Tensor>();
  return {
      [=] {
        const at::NoGradGuard no_grad;
        fastamp::autocast::TensorIdentity as_cast(scene->weight);
        *made = scene->weight.detach().to(kTo);
        KeptCastStore::instance().keep(scene->weight, std::move(as_cast), kTo, *made);
      },
      [=] {
        scene->found = made->detach();
        *made = at::Tensor();
        scene->as_found = scene->found.clone();
      },
      [=] { CHECK(scene->found.equal(scene->as_found)); },
  };
}

Calls edit(const std::shared_ptr<Scene>& scene) {
  return {[=] {
    const at::NoGradGuard no_grad;
    scene->weight.fill_(3);
  }};
}

}  // namespace

TEST_CASE("a kept cast whose maker does not use it yet is not written") {
  std::shared_ptr<Scene> scene;
  const auto make = [&] {
    scene = std::make_shared<Scene>();
    return std::vector<Calls>{optimizer(scene), making_region(scene)};
  };
  const auto orders = for_every_order(make, [&] {
    const at::Tensor after = KeptCastStore::instance().find(scene->weight, kTo);
    CHECK((!after.defined() || after.equal(scene->weight.detach().to(kTo))));
  });
  CHECK(orders == 84);
}

TEST_CASE("a kept cast that a step writes is found whole, up to date, or not at all") {
  const bool edits = GENERATE(false, true);
  std::shared_ptr<Scene> scene;
  const auto make = [&] {
    scene = std::make_shared<Scene>();
    std::vector<Calls> threads = {optimizer(scene), region(scene)};
    if (edits) {
      threads.push_back(edit(scene));
    }
    return threads;
  };
  std::size_t found = 0;
  const auto orders = for_every_order(make, [&] {
    const at::Tensor after = KeptCastStore::instance().find(scene->weight, kTo);
    if (after.defined()) {
      ++found;
      CHECK(after.equal(scene->weight.detach().to(kTo)));
    }
  });
  CHECK(orders == (edits ? 252 : 28));
  // Without an edit, the step's own cast is there in the end; with one after it, none is.
  CHECK((edits ? found < orders : found == orders));
}
