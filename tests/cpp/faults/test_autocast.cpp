// SPDX-License-Identifier: Apache-2.0
// Regions, casts and what watches them without memory: an error, and nothing left half done.

#include "faults/every_allocation.h"
#include "faults/failing_memory.h"
#include "faults/training.h"
#include "float8/float8_cast.h"
#include "support/autocast_state.h"
#include "support/catch.h"

#include <fastamp/autocast/cast_together.h>
#include <fastamp/autocast/float8.h>
#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/kept_casts.h>
#include <fastamp/autocast/trace.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/softmax.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::test::fail_every_allocation;
using fastamp::test::FailingMemory;
using fastamp::test::Fails;
using fastamp::test::LeavesNoTrace;
using fastamp::test::MakeSubject;
using fastamp::test::numbers;
using fastamp::test::Seen;
using fastamp::test::Subject;
using fastamp::test::TorchEnds;

namespace {

struct Forward {
  at::Tensor weight = numbers({4, 4}).requires_grad_(true);
  at::Tensor input = numbers({3, 4});
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> graph;  ///< Of all calls: freed with the subject.

  Forward() { graph.reserve(64); }

  /// Each kind of policy, a weight used twice and a view of it.
  std::vector<at::Tensor> made() {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    graph.push_back(at::mm(input, weight));
    const auto first = graph.back();
    graph.push_back(weight.t());
    graph.push_back(at::mm(first, graph.back()));
    const auto second = graph.back();
    graph.push_back(at::softmax(second, 1));
    const auto third = graph.back();
    graph.push_back(at::cat({second, third}));
    return {first, second, third, graph.back()};
  }
  void run() { results = made(); }

  Seen look() const {
    Seen seen;
    for (const auto& result : results) {
      seen.add(result);
    }
    return seen.add(weight).add(weight.grad());
  }
};

MakeSubject forward_subjects(const std::function<void(Forward&)>& call) {
  return [=]() -> Subject {
    auto forward = std::make_shared<Forward>();
    return {[=] { call(*forward); }, [=] { return forward->look(); }, forward};
  };
}

int fail_in_graphs(const MakeSubject& make) {
  return fail_every_allocation(make, {}, TorchEnds::kWithGraphs);
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "memory that fails in a region leaves it whole", "[faults]") {
  SECTION("entering and leaving") {
    fail_every_allocation(forward_subjects([](Forward& /*forward*/) {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      const AutocastGuard inner(c10::kCPU, c10::kHalf, true, false);
    }));
  }
  SECTION("casts") {
    CHECK(fail_in_graphs(forward_subjects([](Forward& forward) { forward.run(); })) > 20);
  }
  SECTION("casts in a region that goes on") {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    fail_in_graphs(forward_subjects([](Forward& forward) { forward.run(); }));
  }
  SECTION("a trace") {
    fail_in_graphs(forward_subjects([](Forward& forward) {
      const fastamp::Trace trace;
      auto results = forward.made();
      const auto text = trace.to_json() + trace.table();
      forward.results = std::move(results);
    }));
  }
}

TEST_CASE("memory that fails in the first region of a thread leaves none open", "[faults]") {
  for (const auto fails : {Fails::kOne, Fails::kAllFrom}) {
    bool happened = true;
    for (int before = 0; happened; ++before) {
      CAPTURE(before);
      bool is_closed = false;
      std::thread([&] {
        const auto state = fastamp::test::public_state();
        {
          const FailingMemory failing(before, fails);
          try {
            const AutocastGuard region(c10::kCPU, c10::kBFloat16);
          } catch (const std::exception&) {
          }
          happened = FailingMemory::happened();
        }
        is_closed = fastamp::test::public_state() == state;
      }).join();
      CHECK(is_closed);
    }
  }
}

TEST_CASE_METHOD(LeavesNoTrace, "memory that fails under kept casts leaves them whole",
                 "[faults]") {
  SECTION("kept") {
    fail_in_graphs([] {
      auto kept = std::make_shared<std::optional<fastamp::KeepCastsGuard>>();
      return forward_subjects([kept](Forward& forward) {
        if (!*kept) {
          kept->emplace(std::vector<at::Tensor>{forward.weight});
        }
        forward.run();
      })();
    });
  }
  SECTION("kept no longer") {
    fail_in_graphs(forward_subjects([](Forward& forward) {
      const fastamp::KeepCastsGuard kept({forward.weight, forward.input});
      forward.run();
    }));
  }
  SECTION("together") {
    fail_in_graphs([] {
      auto together = std::make_shared<std::optional<fastamp::CastTogetherGuard>>();
      return forward_subjects([together](Forward& forward) {
        if (!*together) {
          together->emplace(std::vector<at::Tensor>{forward.weight});
        }
        forward.run();
      })();
    });
  }
}

TEST_CASE("memory that fails in a cast to fp8 gives none", "[faults]") {
  using fastamp::autocast::Float8Wanted;
  const auto wanted =
      GENERATE(Float8Wanted{.rows = true}, Float8Wanted{.rows = true, .columns = true});
  fail_every_allocation(forward_subjects([wanted](Forward& forward) {
    const auto cast = fastamp::autocast::cast_to_float8(forward.input, c10::kFloat8_e4m3fn, wanted);
    forward.results = {cast.rows, cast.inverse_scale};
  }));
}
