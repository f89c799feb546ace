// SPDX-License-Identifier: Apache-2.0
// Emulated: each home of the table of tensors, on streams that run late, and in graphs that are
// replayed, also on another stream than the captured one.

#include "cuda_on_cpu/norm_case.h"
#include "kernels/amp_args.h"
#include "support/catch.h"

#include <cmath>

using namespace fastamp::test;
using fastamp::kernels::norm_and_check_cuda;
using fastamp::kernels::unscale_and_check_cpu;
using fastamp::kernels::unscale_and_check_cuda;

namespace {

const std::optional<at::Tensor> kNone;

/// Many small gradients, and what unscaling makes of them.
struct Lists {
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> expected;
  at::Tensor factor = scalar(0.5F);
  at::Tensor flag = scalar(0.0F);

  explicit Lists(std::size_t count) {
    Values values(10);
    for (std::size_t i = 0; i < count; ++i) {
      grads.push_back(values.tensor(1 + static_cast<std::int64_t>(i % 23), at::kFloat, i % 4));
    }
    expected = copies_of(grads);
  }
  void unscale() const { unscale_and_check_cuda({grads, factor, flag, kNone, kNone}); }
  void norm(const NormOutputs& to) const {
    norm_and_check_cuda({grads, factor, flag, *to.sum, to.counts, std::nullopt, kNone, kNone});
  }
  void check_unscaled_once_more() const {
    const auto unused = scalar(0.0F);
    unscale_and_check_cpu({expected, factor, unused, kNone, kNone});
    CHECK(same_bits(grads, expected));
  }
};

/// In the small arguments, in the large ones, in device memory.
std::size_t count_for_a_home() {
  return GENERATE(std::size_t{10}, std::size_t{300}, std::size_t{2000});
}

struct LateStream : emulator::Stream {
  explicit LateStream(std::int64_t id) : Stream(id) { late = true; }
};

}  // namespace

TEST_CASE("emulated tables: all that the host frees is gone before the kernel runs", "[tables]") {
  emulator::device() = {1, 512};
  LateStream stream(1);
  const emulator::UseStream use(stream);
  const Lists lists(count_for_a_home());
  lists.unscale();
  stream.synchronize();
  lists.check_unscaled_once_more();
}

TEST_CASE("emulated tables: a graph is replayed on any stream", "[tables]") {
  emulator::device() = {1, 512};
  LateStream captured(1);
  LateStream other(2);
  const Lists lists(count_for_a_home());
  const NormOutputs outputs(lists.grads.size());
  emulator::Graph graph;
  {
    const emulator::UseStream use(captured);
    const emulator::Capture capture(captured, graph);
    lists.unscale();
    lists.norm(outputs);
  }
  CHECK(same_bits(lists.grads, lists.expected));
  std::vector<emulator::Stream*> streams = {&other, &captured};
  if (brief() && lists.grads.size() > 1000) {  // writing the table takes 2048 threads per pass
    streams.pop_back();
  }
  for (emulator::Stream* const stream : streams) {
    stream->replay(graph);
    stream->synchronize();
    lists.check_unscaled_once_more();
    CHECK(outputs.sum_value() == Approx(exact_sum(lists.grads, 0.5F)).epsilon(1e-13));
    CHECK(value_of(lists.flag) == 0.0F);
  }
  const auto middle = static_cast<std::int64_t>(lists.grads.size() / 2);
  set_element(lists.grads[lists.grads.size() / 2], 0, NAN);
  other.replay(graph);
  if (!brief()) {
    other.replay(graph);  // found_inf and counts are as they are after one
  }
  other.synchronize();
  CHECK(value_of(lists.flag) == 1.0F);
  CHECK(outputs.counts->const_data_ptr<std::int64_t>()[2 * middle + 1] == 1);
}

TEST_CASE("emulated tables: kernels write the table under capture, 32 KiB each", "[tables]") {
  emulator::device() = {1, 512};
  LateStream stream(1);
  const emulator::UseStream use(stream);
  const Lists lists(2000);
  emulator::Graph graph;
  const auto before = emulator::statistics().launches;
  {
    const emulator::Capture capture(stream, graph);
    lists.unscale();
  }
  CHECK(emulator::statistics().launches - before == 3);  // 40 008 bytes, and the op
  CHECK(emulator::statistics().most_argument_bytes <= 32764);
}

TEST_CASE("emulated tables: a driver that takes 4 KiB of arguments", "[tables]") {
  emulator::device() = {1, 256, 12000};
  LateStream stream(1);
  const emulator::UseStream use(stream);
  const Lists lists(brief() ? 10 : 300);
  const NormOutputs outputs(lists.grads.size());
  emulator::Graph graph;
  lists.unscale();
  stream.synchronize();
  lists.check_unscaled_once_more();
  const auto before = emulator::statistics().launches;
  {
    const emulator::Capture capture(stream, graph);
    lists.unscale();
    lists.norm(outputs);
  }
  if (!brief()) {
    // 6004 and 8404 bytes of tables in parcels of 4032, and the two ops.
    CHECK(emulator::statistics().launches - before == 2 + 3 + 2);
  }
  stream.replay(graph);
  stream.synchronize();
  lists.check_unscaled_once_more();
  CHECK(outputs.sum_value() == Approx(exact_sum(lists.grads, 0.5F)).epsilon(1e-13));
}

TEST_CASE("emulated tables: another thread's capture does not hinder an upload", "[tables]") {
  emulator::device() = {1, 512};
  emulator::Stream captured(1);
  emulator::Stream own(2);
  const emulator::UseStream use(own);
  const Lists lists(2000);
  emulator::Graph graph;
  {
    const emulator::Capture capture(captured, graph);
    lists.unscale();
  }
  CHECK(graph.nodes.empty());
  lists.check_unscaled_once_more();
}
