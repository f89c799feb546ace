// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/catch.h"
#include "support/threads.h"
#include "support/warnings.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/registration.h>

#include <ATen/ops/mm.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include <atomic>

using fastamp::AutocastGuard;
using namespace fastamp::test;

// An executable of its own, with one test case: what happens the first time in a process happens
// once.

namespace {

constexpr int kThreads = 16;

struct Results {
  at::Tensor product;
  at::Tensor loss;
};

Results run(const at::Tensor& x) { return {at::mm(x, x), at::mse_loss(x, x.to(c10::kHalf))}; }

}  // namespace

TEST_CASE("first use: torch's kernels before, fastamp's with the same results after",
          "[autocast][registration]") {
  CHECK_FALSE(fastamp::kernels_registered());
  const auto x = at::randn({16, 16});
  const auto by_torch = [&] {
    const HandRegion region(c10::kCPU, c10::kBFloat16);
    return run(x);
  }();
  CHECK(by_torch.product.scalar_type() == c10::kBFloat16);

  // The first guards of the process, in many threads at once: all find the kernels in place, and
  // torch's warning about kernels registered over its own never gets through.
  std::atomic<int> wrong = 0;
  std::atomic<int> printed = 0;
  Meeting meeting(kThreads);
  run_threads(kThreads, [&](int i) {
    const CapturedWarnings warnings;
    meeting.wait();
    if (i % 2 == 0) {
      fastamp::register_kernels();
    }
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    wrong += !fastamp::kernels_registered() ? 1 : 0;
    const auto by_fastamp = run(x);
    wrong += !bit_equal(by_fastamp.product, by_torch.product) ? 1 : 0;
    wrong += !bit_equal(by_fastamp.loss, by_torch.loss) ? 1 : 0;
    printed += static_cast<int>(warnings.texts().size());
  });
  CHECK(wrong == 0);
  CHECK(printed == 0);

  // All threads have ended: quiet enough to go back and forth.
  for (int i = 0; i < 20; ++i) {
    const CapturedWarnings warnings;
    fastamp::unregister_kernels();
    fastamp::register_kernels();
    CHECK(warnings.texts().empty());
  }
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  CHECK(bit_equal(run(x).product, by_torch.product));
}
