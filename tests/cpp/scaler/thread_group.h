// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

namespace fastamp::test {

constexpr std::size_t kRanks = 2;

/// Where ranks, each a thread, take the maximum of one number each.
class RankMeeting {
 public:
  float max_of(float value) {
    std::unique_lock lock(mutex_);
    const auto round = rounds_;
    most_ = arrived_ == 0 ? value : std::max(most_, value);
    if (++arrived_ == kRanks) {
      agreed_ = most_;
      arrived_ = 0;
      ++rounds_;
      complete_.notify_all();
      return agreed_;
    }
    TORCH_CHECK(
        complete_.wait_for(lock, std::chrono::seconds(60), [&] { return rounds_ != round; }),
        "a rank stayed away from collective ", round);
    return agreed_;  // The next round cannot end without this rank.
  }

  std::size_t rounds() const { return rounds_; }

 private:
  std::mutex mutex_;
  std::condition_variable complete_;
  std::size_t arrived_ = 0;
  std::size_t rounds_ = 0;
  float most_ = 0.0F;
  float agreed_ = 0.0F;
};

class ThreadBackend : public c10d::Backend {
 public:
  ThreadBackend(RankMeeting& meeting, int rank)
      : c10d::Backend(rank, static_cast<int>(kRanks)), meeting_(meeting) {}

  const std::string getBackendName() const override { return "threads"; }  // NOLINT: its type

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    struct Done : c10d::Work {
      bool isCompleted() override { return true; }
      bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
    };
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::MAX && tensors.size() == 1, "not agreement");
    auto& flag = tensors.front();
    TORCH_CHECK(flag.scalar_type() == at::kFloat && flag.numel() == 1, "not a flag");
    *flag.mutable_data_ptr<float>() = meeting_.max_of(*flag.const_data_ptr<float>());
    return c10::make_intrusive<Done>();
  }

 private:
  RankMeeting& meeting_;
};

inline c10::intrusive_ptr<c10d::ProcessGroup> thread_group(RankMeeting& meeting, int rank) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, static_cast<int>(kRanks));
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<ThreadBackend>(meeting, rank));
  return group;
}

}  // namespace fastamp::test
