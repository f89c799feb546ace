// SPDX-License-Identifier: Apache-2.0
// Emulated: what multi_tensor_apply hands to an op. The op here notes the ranges and touches no
// tensor, so the lists may be larger than any memory.

#include "cuda_on_cpu/emulator/emulator.h"
#include "kernels/cuda/multi_tensor.cuh"
#include "kernels/cuda/zeroed_workspace.h"
#include "support/catch.h"

#include <algorithm>
#include <cstdint>
#include <vector>

using namespace fastamp::kernels::cuda;

namespace {

struct Note {
  std::int32_t entry;
  std::int64_t begin;
  std::int64_t end;
  std::uint16_t tag;
};

/// What the op leaves: notes in any order, and how often its parts were called.
struct Notes {
  unsigned count = 0;
  unsigned ended = 0;
  unsigned finished = 0;
  Note notes[4096] = {};
};

template <std::int64_t kNumel>
struct NoteOp {
  static constexpr std::int64_t kChunkNumel = kNumel;

  Notes* notes;
  unsigned* arrivals;
  struct Thread {};

  __device__ Thread begin() const { return {}; }
  template <typename Table>
  __device__ void range(Thread& /*thread*/, const Table& table, const ChunkRange& range,
                        int lane) const {
    if (lane == 0) {
      notes->notes[atomicAdd(&notes->count, 1U)] = {range.entry, range.begin, range.end,
                                                    packed_tag(table.packed[range.entry])};
    }
  }
  __device__ void end(Thread& /*thread*/) const { atomicAdd(&notes->ended, 1U); }
  template <typename Table>
  __device__ void finish(const Table& /*table*/) const {
    if (__ldcg(&notes->ended) == gridDim.x * kBlockThreads) {
      atomicAdd(&notes->finished, 1U);
    }
  }
};

std::vector<TensorEntry<1>> entries_of(const std::vector<std::int64_t>& numels) {
  std::vector<TensorEntry<1>> entries;
  for (std::size_t i = 0; i < numels.size(); ++i) {
    entries.push_back({{nullptr}, numels[i], static_cast<std::uint16_t>(i * 7)});
  }
  return entries;
}

/// Every element of every entry is in one range, and the op's parts were called as promised.
template <std::int64_t kNumel>
void check_covers_with(const std::vector<std::int64_t>& numels) {
  Notes notes;
  unsigned arrivals = 0;
  multi_tensor_apply(entries_of(numels), NoteOp<kNumel>{&notes, &arrivals});
  REQUIRE(arrivals == 0);
  REQUIRE(notes.finished == kBlockThreads);
  std::vector<Note> all(notes.notes, notes.notes + notes.count);
  std::sort(all.begin(), all.end(), [](const Note& a, const Note& b) {
    return a.entry != b.entry ? a.entry < b.entry : a.begin < b.begin;
  });
  std::vector<std::int64_t> covered(numels.size(), 0);
  for (const Note& note : all) {
    const auto i = static_cast<std::size_t>(note.entry);
    REQUIRE(note.begin == covered.at(i));
    REQUIRE(note.end > note.begin);
    REQUIRE(note.begin % kNumel == 0);
    REQUIRE(note.tag == static_cast<std::uint16_t>(i * 7));
    covered[i] = note.end;
  }
  REQUIRE(covered == numels);
}

void check_covers(const std::vector<std::int64_t>& numels) {
  check_covers_with<kFineChunkNumel>(numels);
  check_covers_with<kSumChunkNumel>(numels);
}

}  // namespace

TEST_CASE("emulated launch: every element once, whatever the list", "[multi_tensor]") {
  const auto order =
      GENERATE(emulator::Order::kForward, emulator::Order::kReverse, emulator::Order::kRandom);
  emulator::device() =
      order == emulator::Order::kForward ? emulator::Device{1, 256} : emulator::Device{2, 256};
  emulator::set_order(order);
  check_covers({1});
  check_covers({2047, 2048, 2049, 1, 6144, 6145});
  check_covers(std::vector<std::int64_t>(300, 5));   // in the large arguments
  check_covers(std::vector<std::int64_t>(2000, 3));  // in device memory
  check_covers({100, 5000, 0, 0});                   // empty ones stand last
  check_covers({});                                  // only finish() is left to do
}

TEST_CASE("emulated launch: tensors beyond 2^31 and 2^32 elements", "[multi_tensor]") {
  emulator::device() = {2, 256};
  constexpr auto kBig = std::int64_t{1} << 31;
  check_covers({kBig - 1, kBig, kBig + 1});
  check_covers({1, 4 * kBig + 2047, 3});
  check_covers({(std::int64_t{1} << 38) + 5});
  check_covers_with<kSumChunkNumel>({(std::int64_t{1} << 42) + 5});
}
