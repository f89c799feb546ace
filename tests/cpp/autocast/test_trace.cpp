// SPDX-License-Identifier: Apache-2.0
#include "support/autocast_state.h"
#include "support/casts.h"
#include "support/catch.h"

#include <fastamp/autocast/guard.h>
#include <fastamp/autocast/trace.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <string>
#include <thread>
#include <vector>

using fastamp::AutocastGuard;
using fastamp::OpPolicy;
using fastamp::Trace;
using fastamp::TraceOrder;
using namespace fastamp::test;

namespace {

fastamp::TraceRow only_row(const Trace& trace, const std::string& op) {
  std::vector<fastamp::TraceRow> found;
  for (auto& row : trace.rows()) {
    if (row.op == op) {
      found.push_back(row);
    }
  }
  REQUIRE(found.size() == 1);
  return found.front();
}

}  // namespace

TEST_CASE_METHOD(LeavesNoTrace, "Trace: a row says op, dtypes, policy and casts",
                 "[autocast][trace]") {
  const auto weight = make_weight(8, 2);
  Trace trace;
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    at::mm(at::ones({4, 8}), weight);
    at::mm(at::ones({4, 8}), weight);
  }
  const auto row = only_row(trace, "mm");
  CHECK(row.device == c10::kCPU);
  CHECK(row.policy == OpPolicy::kLower);
  CHECK(row.inputs == std::vector{c10::kFloat, c10::kFloat});
  CHECK(row.run_dtype == c10::kBFloat16);
  CHECK(row.source.empty());
  CHECK(row.calls == 2);
  CHECK(row.casts.weight_casts == 1);
  CHECK(row.casts.other_casts == 2);
  CHECK(row.casts.cache_hits == 1);
  CHECK(row.casts.cast_bytes == 2 * (2 * 4 * 8 + 8 * 2));
  CHECK(trace.totals().casts() == 3);
}

TEST_CASE_METHOD(LeavesNoTrace, "Trace: gradients cast back are counted", "[autocast][trace]") {
  const auto weight = make_weight(4, 2);
  const Trace trace;
  at::Tensor out;
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    out = column_sums(weight);
  }
  out.sum().backward();
  CHECK(trace.gradient_casts().casts == 1);
  CHECK(trace.gradient_casts().bytes == 4 * 2 * 4);
}

TEST_CASE_METHOD(LeavesNoTrace, "Trace: stop ends it, other traces go on", "[autocast][trace]") {
  Trace outer;
  Trace inner;
  const AutocastGuard region(c10::kCPU, c10::kBFloat16);
  const auto x = at::ones({2, 2});
  at::mm(x, x);
  inner.stop();
  inner.stop();
  at::mm(x, x);
  CHECK(only_row(inner, "mm").calls == 1);
  CHECK(only_row(outer, "mm").calls == 2);
}

TEST_CASE_METHOD(LeavesNoTrace, "Trace: all threads are recorded", "[autocast][trace]") {
  const Trace trace;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      const AutocastGuard region(c10::kCPU, c10::kBFloat16);
      const auto x = at::ones({2, 2});
      for (int n = 0; n < 50; ++n) {
        at::mm(x, x);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(only_row(trace, "mm").calls == 200);
}

TEST_CASE_METHOD(LeavesNoTrace, "Trace: table and JSON", "[autocast][trace]") {
  Trace trace;
  {
    const AutocastGuard region(c10::kCPU, c10::kBFloat16);
    const auto x = at::ones({4, 4});
    at::mm(x, x);
    at::mm(x, x);
    at::cat({x, x.to(c10::kBFloat16)});
  }
  trace.stop();
  const std::string by_bytes = trace.table();
  CHECK(by_bytes.find("\nmm ") < by_bytes.find("\ncat "));
  const std::string by_name = trace.table(TraceOrder::kName);
  CHECK(by_name.find("\ncat ") < by_name.find("\nmm "));
  CHECK(trace.table(TraceOrder::kName, 1).find("1 more rows") != std::string::npos);
  const std::string json = trace.to_json();
  CHECK(
      json.find(R"({"op": "mm", "device": "cpu", "policy": "lower", "inputs": ["float32", )"
                R"("float32"], "run_dtype": "bfloat16", "float8": "", "source": "", "module": "", )"
                R"("calls": 2, )") != std::string::npos);
}

TEST_CASE("trace_order_from_string: refuses unknown names", "[autocast][trace]") {
  CHECK(fastamp::trace_order_from_string("calls") == TraceOrder::kCalls);
  CHECK_THROWS_WITH(
      fastamp::trace_order_from_string("size"),
      Catch::StartsWith("trace_order_from_string: expected name to be one of cast_bytes, casts, "
                        "calls, name, got 'size'"));
}
