// SPDX-License-Identifier: Apache-2.0
// A thread that reads the log never uses a cast of a value that is no longer there.
#include "core/change_log.h"
#include "interleavings/explorer.h"
#include "support/catch.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace {

using namespace fastamp::interleavings;

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr std::size_t kRemembered = 2;

struct Model {
  fastamp::ChangeLog<ModelThreads, int, kRemembered> log;
  std::array<ModelThreads::Atomic<int>, 3> weights{
      ModelThreads::Atomic<int>(0), ModelThreads::Atomic<int>(0), ModelThreads::Atomic<int>(0)};
  ModelThreads::Atomic<int> steps{0};  ///< How the optimizer's thread notifies others.
};

/// The cache of a reading thread, with a cast of weight 0, as CastCache does it.
struct Reader {
  Model& model;
  std::uint64_t seen = 0;
  int cast = -1;  ///< -1: there is none.

  /// The cast's value.
  int use() {
    if (seen != model.log.count()) {
      const auto changes = model.log.since(seen);
      require(changes.count > seen, "the count goes back");
      cast = changes.all || changes.keys.contains(0) ? -1 : cast;
      seen = changes.count;
    }
    if (cast == -1) {
      cast = model.weights.at(0).load(kRelaxed);
      seen = model.log.count();  // Nothing else is in the cache.
    }
    return cast;
  }
};

enum class FirstCast { kBeforeTheStep, kDuringIt };

/// One thread writes weights and says so. Another has a cast of weight 0, and uses it again once it
/// was notified of the step.
Exploration explore_step(std::size_t weights, FirstCast first_cast = FirstCast::kBeforeTheStep) {
  return explore([=](Program& program) {
    auto model = std::make_shared<Model>();
    program.thread([=] {
      for (std::size_t i = 0; i < weights; ++i) {
        model->weights.at(i).store(1, kRelaxed);
        model->log.add(std::array{static_cast<int>(i)});
      }
      model->steps.store(1, std::memory_order_release);
    });
    program.thread([=] {
      Reader reader{.model = *model, .cast = first_cast == FirstCast::kBeforeTheStep ? 0 : -1};
      static_cast<void>(reader.use());
      if (model->steps.load(std::memory_order_acquire) == 1) {
        require(reader.use() == 1, "a cast of an old value is used after the step");
        require(reader.seen == weights, "an announcement is missed");
      }
    });
  });
}

}  // namespace

TEST_CASE("casts of changed weights are made anew by a thread that knows of the step") {
  for (const std::size_t weights : {1, 2, 3}) {  // 3: more than are remembered
    const auto result = explore_step(weights);
    CAPTURE(weights, result.runs);
    CHECK(result.failure == "");
    CHECK(result.is_complete);
  }
}

TEST_CASE("two threads announce, one reads: nothing is lost") {
  const auto result = explore([](Program& program) {
    auto model = std::make_shared<Model>();
    for (int i = 0; i < 2; ++i) {
      program.thread([=] { model->log.add(std::array{i}); });
    }
    program.thread([=] {
      const auto first = model->log.since(0);
      const auto rest = model->log.since(first.count);
      require(!first.all && !rest.all, "all is said although both are remembered");
      require(first.keys.size() == first.count, "a number without its key");
      require(rest.keys.size() == rest.count - first.count, "a number without its key");
    });
    program.afterwards([=] {
      require(model->log.count() == 2 && model->log.since(0).keys.size() == 2,
              "an announcement is lost");
    });
  });
  CHECK(result.failure == "");
  CHECK(result.is_complete);
}

TEST_CASE("a weight that is written while it is cast may stay old, as with torch's cache") {
  CHECK_THAT(explore_step(1, FirstCast::kDuringIt).failure, Catch::Contains("old value"));
}
