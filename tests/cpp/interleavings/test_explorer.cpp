// SPDX-License-Identifier: Apache-2.0
// The explorer itself: it finds what C++ allows, and nothing that C++ forbids.
#include "interleavings/explorer.h"
#include "support/catch.h"

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace {

using namespace fastamp::interleavings;
using Number = ModelThreads::Atomic<int>;

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;
constexpr auto kTotal = std::memory_order_seq_cst;

struct Two {
  Number x{0};
  Number y{0};
  int first = -1;
  int second = -1;
};

using Outcomes = std::set<std::pair<int, int>>;

/// What two threads can read: each stores to one location, then loads the other.
Outcomes store_then_load(std::memory_order order, bool fence) {
  Outcomes outcomes;
  const auto result = explore([&](Program& program) {
    auto two = std::make_shared<Two>();
    program.thread([=] {
      two->x.store(1, order);
      if (fence) {
        ModelThreads::fence_all_threads();
      }
      two->first = two->y.load(order);
    });
    program.thread([=] {
      two->y.store(1, order);
      two->second = two->x.load(order);
    });
    program.afterwards([=, &outcomes] { outcomes.emplace(two->first, two->second); });
  });
  CHECK(result.failure.empty());
  CHECK(result.is_complete);
  return outcomes;
}

/// What a reader can see of a value and of the flag that announces it.
Outcomes announce(std::memory_order store, std::memory_order load) {
  Outcomes outcomes;
  explore([&](Program& program) {
    auto two = std::make_shared<Two>();
    program.thread([=] {
      two->x.store(1, kRelaxed);
      two->y.store(1, store);
    });
    program.thread([=] {
      two->first = two->y.load(load);
      two->second = two->x.load(kRelaxed);
    });
    program.afterwards([=, &outcomes] { outcomes.emplace(two->first, two->second); });
  });
  return outcomes;
}

}  // namespace

TEST_CASE("two threads that store and then load may miss each other, unless in the total order") {
  const Outcomes ordered = {{0, 1}, {1, 0}, {1, 1}};
  const Outcomes all = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
  CHECK(store_then_load(kRelaxed, false) == all);
  CHECK(store_then_load(kTotal, false) == ordered);
  CHECK(store_then_load(kRelaxed, true) == ordered);
}

TEST_CASE("a value is visible with the flag that releases it, if that is acquired") {
  const Outcomes published = {{0, 0}, {0, 1}, {1, 1}};
  const Outcomes all = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
  CHECK(announce(kRelease, kAcquire) == published);
  CHECK(announce(kRelaxed, kAcquire) == all);
  CHECK(announce(kRelease, kRelaxed) == all);
}

TEST_CASE("no thread reads an older value of a location after a newer one") {
  const auto result = explore([](Program& program) {
    auto x = std::make_shared<Number>(0);
    program.thread([=] {
      x->store(1, kRelaxed);
      x->store(2, kRelaxed);
    });
    for (int reader = 0; reader < 2; ++reader) {
      program.thread([=] {
        const int before = x->load(kRelaxed);
        require(x->load(kRelaxed) >= before, "a value goes back");
      });
    }
  });
  CHECK(result.failure.empty());
  CHECK(result.is_complete);
}

TEST_CASE("every order of three threads is run, and each once") {
  // Three exchanges of one location: 3! orders; of three locations: they do not touch.
  for (const bool same : {true, false}) {
    const auto result = explore([&](Program& program) {
      auto places = std::make_shared<std::array<Number, 3>>(
          std::array<Number, 3>{Number(0), Number(0), Number(0)});
      for (int i = 0; i < 3; ++i) {
        program.thread([=] { places->at(same ? 0 : i).exchange(i, kRelaxed); });
      }
    });
    CHECK(result.runs == (same ? 6 : 1));
  }
}

TEST_CASE(
    "data races, deadlocks and broken requirements are found, with the steps that lead there") {
  const auto race = explore([](Program& program) {
    auto value = std::make_shared<Plain<int>>();
    program.thread([=] { value->set(1); });
    program.thread([=] { static_cast<void>(value->get()); });
  });
  CHECK_THAT(race.failure, Catch::Contains("data race"));

  const auto deadlock = explore([](Program& program) {
    struct Locks {
      ModelThreads::Mutex a;
      ModelThreads::Mutex b;
    };
    auto locks = std::make_shared<Locks>();
    program.thread([=] {
      const std::scoped_lock first(locks->a);
      const std::scoped_lock second(locks->b);
    });
    program.thread([=] {
      const std::scoped_lock first(locks->b);
      const std::scoped_lock second(locks->a);
    });
  });
  CHECK_THAT(deadlock.failure, Catch::Contains("waits") && Catch::Contains("thread 1 locks"));

  const auto lost = explore([](Program& program) {
    auto sum = std::make_shared<Number>(0);
    for (int i = 0; i < 2; ++i) {
      program.thread([=] { sum->store(sum->load() + 1); });
    }
    program.afterwards([=] { require(sum->load() == 2, "an addition is lost"); });
  });
  CHECK_THAT(lost.failure, Catch::Contains("an addition is lost"));
}

TEST_CASE("what a mutex guards is no data race") {
  const auto result = explore([](Program& program) {
    struct Guarded {
      ModelThreads::Mutex mutex;
      Plain<int> value;
    };
    auto guarded = std::make_shared<Guarded>();
    for (int i = 0; i < 3; ++i) {
      program.thread([=] {
        const std::scoped_lock lock(guarded->mutex);
        guarded->value.set(guarded->value.get() + 1);
      });
    }
    program.afterwards([=] { require(guarded->value.get() == 3, "an addition is lost"); });
  });
  CHECK(result.failure.empty());
  CHECK(result.is_complete);
}
