// SPDX-License-Identifier: Apache-2.0
// A process that exits while detached threads are at work. What they use of LibTorch must stay
// alive, so they run no ops: LibTorch's own crash then.

#include "support/casts.h"
#include "support/catch.h"
#include "support/warnings.h"

#include <fastamp/autocast/cast_together.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/op_policy_guard.h>
#include <fastamp/autocast/trace.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

using fastamp::AutocastGuard;

namespace {

using Work = std::function<void()>;

constexpr int kThreads = 2;
std::atomic<int> g_at_work = 0;

/// The main thread returns from main() while the others go on. Does not return.
[[noreturn]] void exit_at_work(const Work& work) {
  for (int i = 0; i < kThreads; ++i) {
    std::thread([&work] {
      work();
      g_at_work.fetch_add(1);
      for (;;) {
        work();
      }
    }).detach();
  }
  while (g_at_work.load() < kThreads) {
    std::this_thread::yield();
  }
  std::exit(0);  // NOLINT(concurrency-mt-unsafe): what is tested
}

/// How many of some exits do not end with code 0: of a quarter of them, unless what takes long is
/// run. A fork costs less than a new process, and its exit runs the same destructors, which is
/// where the time goes.
int bad_exits(int count, const Work& work) {
  if (std::getenv("FASTAMP_LONG") == nullptr) {  // NOLINT(concurrency-mt-unsafe): no other thread
    count = std::max(2, count / 4);
  }
  int bad = 0;
  std::fflush(nullptr);
  for (int i = 0; i < count; ++i) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      exit_at_work(work);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    bad += status == 0 ? 0 : 1;
  }
  return bad;
}

void enter_and_leave() {
  const AutocastGuard outer(c10::kCPU, c10::kBFloat16);
  const AutocastGuard inner(c10::kCPU, std::nullopt, /*enabled=*/false);
}

}  // namespace

// First, while the process has no threads and no region was ever entered.
TEST_CASE("process exit: threads that enter their first regions", "[autocast][exit]") {
  CHECK(bad_exits(10, enter_and_leave) == 0);
}

TEST_CASE("process exit: threads that enter and leave regions", "[autocast][exit]") {
  enter_and_leave();
  CHECK(bad_exits(40, enter_and_leave) == 0);
}

TEST_CASE("process exit: threads that ask for regions on a GPU", "[autocast][exit]") {
  const auto work = [] {
    const fastamp::test::CapturedWarnings warnings;  // Where there is none.
    const AutocastGuard region(c10::kCUDA, c10::kHalf);
  };
  work();
  CHECK(bad_exits(8, work) == 0);
}

TEST_CASE("process exit: threads that change policies for themselves", "[autocast][exit]") {
  const auto work = [] {
    const fastamp::OpPolicyGuard guard({{"mm", fastamp::OpPolicy::kFp32, std::nullopt},
                                        {"softmax.int", fastamp::OpPolicy::kPass, c10::kCPU}});
  };
  work();
  CHECK(bad_exits(8, work) == 0);
}

TEST_CASE("process exit: threads that open traces", "[autocast][exit]") {
  const auto work = [] {
    fastamp::Trace trace;
    enter_and_leave();
    static_cast<void>(trace.rows());
    static_cast<void>(trace.to_json());
  };
  work();
  CHECK(bad_exits(8, work) == 0);
}

TEST_CASE("process exit: threads that keep casts and ask for casts together", "[autocast][exit]") {
  static const auto* const weights = new std::vector<at::Tensor>{fastamp::test::make_weight(4, 4),
                                                                 fastamp::test::make_weight(2, 4)};
  const auto work = [] {
    const fastamp::KeepCastsGuard keep(*weights);
    const fastamp::CastTogetherGuard together(*weights);
    enter_and_leave();
    static_cast<void>(fastamp::kept_casts());
    fastamp::drop_kept_casts(*weights);
    fastamp::clear_cast_cache();
  };
  work();
  CHECK(bad_exits(8, work) == 0);
}
