// SPDX-License-Identifier: Apache-2.0
// Emulated: memory that is zero between kernels, per stream and per graph.

#include "cuda_on_cpu/norm_case.h"
#include "kernels/amp_args.h"
#include "kernels/cuda/zeroed_workspace.h"
#include "support/catch.h"

#include <algorithm>
#include <cmath>

using namespace fastamp::test;
using fastamp::kernels::cuda::ZeroedWorkspace;

namespace {

constexpr std::size_t kBytes = 4096;

bool all_zero(const ZeroedWorkspace& workspace, std::size_t bytes = kBytes) {
  const auto* const begin = static_cast<const char*>(workspace.get());
  return std::all_of(begin, begin + bytes, [](char c) { return c == 0; });
}

ZeroedWorkspace of_current_stream(std::size_t bytes = kBytes) {
  return {bytes, c10::cuda::getCurrentCUDAStream()};
}

}  // namespace

TEST_CASE("emulated workspace: a stream keeps its own, and gets a larger one", "[workspace]") {
  emulator::Stream one(11);
  emulator::Stream two(12);
  const emulator::UseStream use(one);
  const auto before = emulator::permanent_allocations();
  const auto first = of_current_stream(1);
  CHECK(all_zero(first));
  CHECK(of_current_stream().get() == first.get());
  CHECK(emulator::permanent_allocations() == before + 1);
  {
    const emulator::UseStream other(two);
    CHECK(of_current_stream().get() != first.get());
  }
  const auto larger = of_current_stream(kBytes + 1);
  CHECK(larger.get() != first.get());
  CHECK(all_zero(larger, 2 * kBytes));  // twice as large at least
  CHECK(of_current_stream(2 * kBytes).get() == larger.get());
  CHECK(emulator::permanent_allocations() == before + 3);
}

TEST_CASE("emulated workspace: a graph has its own, cleared at each replay", "[workspace]") {
  emulator::Stream stream(13);
  const emulator::UseStream use(stream);
  const auto before = emulator::permanent_allocations();
  emulator::Graph graph;
  void* memory = nullptr;
  {
    const emulator::Capture capture(stream, graph);
    memory = of_current_stream().get();
  }
  CHECK(emulator::permanent_allocations() == before);
  CHECK(graph.nodes.size() == 1);
  CHECK(memory != of_current_stream().get());
  static_cast<char*>(memory)[kBytes - 1] = 1;
  stream.replay(graph);
  CHECK(static_cast<const char*>(memory)[kBytes - 1] == 0);
}

TEST_CASE("emulated workspace: made while another thread captures", "[workspace]") {
  emulator::Stream captured(14);
  emulator::Stream own(15);
  const emulator::UseStream use(own);
  emulator::Graph graph;
  const emulator::Capture capture(captured, graph);
  CHECK(all_zero(of_current_stream()));
  CHECK(graph.nodes.empty());
}

TEST_CASE("emulated workspace: passes on two streams and in two graphs at once", "[workspace]") {
  // Nothing orders the streams: ThreadSanitizer reports whatever they share.
  emulator::device() = {1, 512};
  emulator::Stream one(16);
  emulator::Stream two(17);
  emulator::Graph graph_one;
  emulator::Graph graph_two;
  Values values(11);
  const std::vector<at::Tensor> first = {values.tensor(5000, at::kFloat)};
  const std::vector<at::Tensor> second = {values.tensor(3000, at::kHalf, 1)};
  set_element(second[0], 17, NAN);
  const NormOutputs outputs_one(1);
  const NormOutputs outputs_two(1);
  const auto factor = scalar(1.0F);
  const std::optional<at::Tensor> none;
  const auto pass = [&](const std::vector<at::Tensor>& grads, const NormOutputs& to) {
    fastamp::kernels::norm_and_check_cuda(
        {grads, factor, to.flag, *to.sum, to.counts, std::nullopt, none, none});
  };
  const auto on = [&](emulator::Stream& stream, emulator::Graph& graph, const auto& grads,
                      const NormOutputs& to) {
    stream.late = true;
    const emulator::UseStream use(stream);
    pass(grads, to);
    const emulator::Capture capture(stream, graph);
    pass(grads, to);
  };
  on(one, graph_one, first, outputs_one);
  on(one, graph_two, second, outputs_two);  // two graphs of one stream
  one.synchronize();
  one.replay(graph_one);
  two.late = true;
  two.replay(graph_two);
  one.synchronize();
  two.synchronize();
  CHECK(outputs_one.sum_value() == Approx(exact_sum(first, 1.0F)).epsilon(1e-13));
  CHECK(value_of(outputs_one.flag) == 0.0F);
  CHECK(value_of(outputs_two.flag) == 1.0F);
  CHECK(outputs_two.counts->const_data_ptr<std::int64_t>()[1] == 1);
}
