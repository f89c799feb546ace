// SPDX-License-Identifier: Apache-2.0
#include "interleavings/explorer.h"

#include <cxxabi.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

namespace fastamp::interleavings {
namespace {

constexpr std::size_t kMaxThreads = 4;
constexpr std::size_t kStackBytes = 64U << 10U;
constexpr std::size_t kNobody = kMaxThreads;  ///< What runs before and after the threads.

using Kind = detail::Kind;
using View = std::vector<std::size_t>;  ///< By location: the oldest store that may be seen.
using Clock = std::array<std::uint64_t, kMaxThreads + 1>;

/// Thrown through a thread whose run is given up.
struct Abort {};

template <class Numbers>
void join(Numbers& into, const Numbers& from) {
  for (std::size_t i = 0; i < std::min(into.size(), from.size()); ++i) {
    into[i] = std::max(into[i], from[i]);
  }
}

void join(View& into, const View& from) {
  into.resize(std::max(into.size(), from.size()), 0);
  join<View>(into, from);
}

struct Store {
  std::uint64_t value;
  View view;  ///< What who acquires it gets to know.
  Clock clock{};
};

/// When an operation can be carried out.
enum class Until : std::uint8_t {
  kNow,
  kMaySee,  ///< Once the thread may see `value`.
  kNewest,  ///< While the newest value is `value`.
};

struct Operation {
  Kind kind = Kind::fence;
  std::size_t location = 0;
  std::memory_order order = std::memory_order_seq_cst;
  Until until = Until::kNow;
  std::uint64_t value = 0;  ///< What is waited for.
};

bool is_load(const Operation& op) { return op.kind == Kind::load; }

/// Whether the order of two operations that follow one another makes no difference.
bool are_independent(const Operation& a, const Operation& b) {
  if (a.kind == Kind::fence || b.kind == Kind::fence) {
    return false;
  }
  const bool both_in_total_order =
      a.order == std::memory_order_seq_cst && b.order == std::memory_order_seq_cst;
  return a.location != b.location || (is_load(a) && is_load(b) && !both_in_total_order);
}

struct Thread {
  std::function<void()> body;
  ucontext_t context{};
  Operation next;
  bool has_ended = false;
  View view;
  Clock clock{};
  std::array<std::uint64_t, 2> exceptions{};  ///< Of the C++ runtime, which keeps them by thread.
};

struct PlainAccesses {
  std::size_t writer = kNobody;
  std::uint64_t written = 0;
  Clock read{};
};

/// What a thread did, for the report of a bad run.
struct Step {
  std::size_t thread;
  Operation op;
  std::uint64_t value;
};

/// One place at which a run can go on in several ways, and which way it goes now.
struct Choice {
  std::vector<std::size_t> ways;
  std::size_t now = 0;
};

class Explorer final : public Program {
 public:
  Exploration explore(const std::function<void(Program&)>& make, std::uint64_t max_runs);

  void thread(std::function<void()> body) override;
  void afterwards(std::function<void()> body) override { afterwards_ = std::move(body); }

  std::size_t make_location(std::uint64_t value);
  /// Lets other threads go first; then the operation is the caller's to carry out.
  void announce(const Operation& op);
  /// Reads one of the stores that the thread may see; of those of `wanted`, if one is.
  std::uint64_t load(std::size_t location, std::memory_order order,
                     std::optional<std::uint64_t> wanted = std::nullopt);
  void store(const Operation& op, std::uint64_t value);
  std::uint64_t newest(std::size_t location) const { return stores_[location].back().value; }
  /// Reads the newest store and, if `writes`, puts a value after it.
  void modify(const Operation& op, bool writes, std::uint64_t value);
  void fence_all_threads();

  std::size_t make_plain();
  void read_plain(std::size_t id);
  void write_plain(std::size_t id);
  [[noreturn]] void fail(const std::string& what);
  bool is_given_up() const { return gives_up_; }

 private:
  void run(const std::function<void(Program&)>& make);
  void run_threads();
  void resume(std::size_t index);
  static void enter();
  bool is_enabled(const Thread& thread) const;
  std::size_t choose(std::vector<std::size_t> ways);
  bool next_path();
  void see(std::size_t location, const Store& store, std::memory_order order);
  void append(std::size_t location, std::uint64_t value, std::memory_order order);
  Thread* current() { return running_ == kNobody ? nullptr : threads_[running_].get(); }
  void note(const Operation& op, std::uint64_t value);
  std::string steps() const;

  // Of the exploration.
  std::vector<Choice> path_;
  std::size_t depth_ = 0;
  std::array<std::vector<char>, kMaxThreads> stacks_;

  // Of one run.
  std::vector<std::unique_ptr<Thread>> threads_;
  std::function<void()> afterwards_;
  std::vector<std::vector<Store>> stores_;  ///< By location, in their order.
  View total_order_;  ///< By location: the newest sequentially consistent one.
  std::vector<PlainAccesses> plains_;
  std::vector<std::size_t> asleep_;  ///< What they would do next has been tried from here.
  std::size_t running_ = kNobody;
  ucontext_t scheduler_{};
  bool gives_up_ = false;
  bool is_known_ = false;  ///< The rest of this run was run before, in another order.
  std::string failure_;
  std::vector<Step> steps_;
};

Explorer* g_explorer = nullptr;

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst || order == std::memory_order_consume;
}

bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}

std::size_t& at(View& view, std::size_t location) {
  if (view.size() <= location) {
    view.resize(location + 1, 0);
  }
  return view[location];
}

/// The exceptions in flight of this system thread, which fibers would otherwise share.
std::array<std::uint64_t, 2>& exceptions_in_flight() {
  static_assert(sizeof(void*) + sizeof(std::uint64_t) == sizeof(std::array<std::uint64_t, 2>));
  return *reinterpret_cast<std::array<std::uint64_t, 2>*>(abi::__cxa_get_globals());
}

Exploration Explorer::explore(const std::function<void(Program&)>& make, std::uint64_t max_runs) {
  Exploration result;
  g_explorer = this;
  do {
    run(make);
    result.runs += is_known_ ? 0 : 1;
    if (!failure_.empty()) {
      result.failure = failure_ + "\n" + steps();
      break;
    }
    result.is_complete = result.runs < max_runs;
  } while (result.is_complete && next_path());
  g_explorer = nullptr;
  return result;
}

bool Explorer::next_path() {
  while (!path_.empty() && path_.back().now + 1 == path_.back().ways.size()) {
    path_.pop_back();
  }
  if (path_.empty()) {
    return false;
  }
  ++path_.back().now;
  return true;
}

std::size_t Explorer::choose(std::vector<std::size_t> ways) {
  if (depth_ == path_.size()) {
    path_.push_back({std::move(ways), 0});
  }
  const Choice& choice = path_[depth_++];
  return choice.ways[choice.now];
}

void Explorer::run(const std::function<void(Program&)>& make) {
  depth_ = 0;
  stores_.clear();
  total_order_.clear();
  plains_.clear();
  asleep_.clear();
  threads_.clear();
  gives_up_ = is_known_ = false;
  steps_.clear();
  afterwards_ = nullptr;
  make(*this);
  run_threads();
  gives_up_ = true;  // Threads that have not ended are unwound.
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    if (!threads_[i]->has_ended) {
      resume(i);
    }
  }
  gives_up_ = false;
  if (failure_.empty() && !is_known_ && afterwards_ != nullptr) {
    try {
      afterwards_();
    } catch (const std::logic_error& error) {
      failure_ = error.what();
    }
  }
  afterwards_ = nullptr;
}

void Explorer::thread(std::function<void()> body) {
  if (threads_.size() == kMaxThreads) {
    throw std::invalid_argument("Program: expected at most 4 threads");
  }
  threads_.push_back(std::make_unique<Thread>());
  threads_.back()->body = std::move(body);
}

void Explorer::run_threads() {
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    threads_[i]->clock[i] = 1;
    resume(i);  // Up to its first operation.
  }
  while (failure_.empty()) {
    std::vector<std::size_t> enabled;
    bool all_ended = true;
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      all_ended = all_ended && threads_[i]->has_ended;
      if (is_enabled(*threads_[i])) {
        enabled.push_back(i);
      }
    }
    if (all_ended) {
      return;
    }
    if (enabled.empty()) {
      failure_ = "every thread that has not ended waits";
      return;
    }
    std::erase_if(enabled,
                  [&](std::size_t i) { return std::ranges::find(asleep_, i) != asleep_.end(); });
    if (enabled.empty()) {
      is_known_ = true;
      return;
    }
    const std::size_t chosen = choose(enabled);
    // Those tried before from here need not be tried again until something touches what they do.
    const Choice& choice = path_[depth_ - 1];
    asleep_.insert(asleep_.end(), choice.ways.begin(),
                   choice.ways.begin() + static_cast<std::ptrdiff_t>(choice.now));
    std::erase_if(asleep_, [&](std::size_t i) {
      return !are_independent(threads_[i]->next, threads_[chosen]->next);
    });
    resume(chosen);
  }
}

bool Explorer::is_enabled(const Thread& thread) const {
  if (thread.has_ended || thread.next.until == Until::kNow) {
    return !thread.has_ended;
  }
  const auto& stores = stores_[thread.next.location];
  std::size_t oldest = stores.size() - 1;
  if (thread.next.until == Until::kMaySee) {
    oldest = thread.next.location < thread.view.size() ? thread.view[thread.next.location] : 0;
  }
  return std::any_of(stores.begin() + static_cast<std::ptrdiff_t>(oldest), stores.end(),
                     [&](const Store& store) { return store.value == thread.next.value; });
}

void Explorer::enter() {
  Explorer& self = *g_explorer;
  Thread& thread = *self.current();
  try {
    if (!self.gives_up_) {
      thread.body();
    }
  } catch (const Abort&) {  // NOLINT(bugprone-empty-catch): unwound, as asked for
  } catch (const std::exception& error) {
    if (self.failure_.empty()) {
      self.failure_ = error.what();
    }
  }
  thread.has_ended = true;
  swapcontext(&thread.context, &self.scheduler_);
}

void Explorer::resume(std::size_t index) {
  Thread& thread = *threads_[index];
  if (thread.context.uc_stack.ss_sp == nullptr) {
    getcontext(&thread.context);
    auto& stack = stacks_[index];
    stack.resize(kStackBytes);
    thread.context.uc_stack.ss_sp = stack.data();
    thread.context.uc_stack.ss_size = stack.size();
    makecontext(&thread.context, &Explorer::enter, 0);
  }
  running_ = index;
  std::swap(exceptions_in_flight(), thread.exceptions);
  swapcontext(&scheduler_, &thread.context);
  std::swap(exceptions_in_flight(), thread.exceptions);
  running_ = kNobody;
}

void Explorer::announce(const Operation& op) {
  Thread* thread = current();
  if (thread == nullptr) {
    return;
  }
  if (!gives_up_) {
    thread->next = op;
    swapcontext(&thread->context, &scheduler_);
  }
  if (gives_up_) {
    // A destructor's operation returns: what it does is of no interest any more.
    if (op.kind != Kind::unlock && std::uncaught_exceptions() == 0) {
      throw Abort{};
    }
    return;
  }
  ++thread->clock[running_];
}

void Explorer::note(const Operation& op, std::uint64_t value) {
  if (running_ != kNobody && !gives_up_) {
    steps_.push_back({running_, op, value});
  }
}

std::string Explorer::steps() const {
  static constexpr std::array kNames = {"loads", "stores",  "exchanges", "compares",
                                        "locks", "unlocks", "fences"};
  std::ostringstream text;
  for (const Step& step : steps_) {
    text << "thread " << step.thread << ' ' << kNames.at(static_cast<std::size_t>(step.op.kind))
         << " location " << step.op.location << ": " << step.value << '\n';
  }
  return text.str();
}

std::size_t Explorer::make_location(std::uint64_t value) {
  stores_.push_back({Store{value, {}, {}}});
  return stores_.size() - 1;
}

void Explorer::see(std::size_t location, const Store& store, std::memory_order order) {
  Thread& thread = *current();
  if (acquires(order)) {
    join(thread.view, store.view);
    join(thread.clock, store.clock);
  }
  if (order == std::memory_order_seq_cst) {
    at(total_order_, location) = std::max(at(total_order_, location), at(thread.view, location));
  }
}

std::uint64_t Explorer::load(std::size_t location, std::memory_order order,
                             std::optional<std::uint64_t> wanted) {
  auto& stores = stores_[location];
  Thread* thread = current();
  if (thread == nullptr) {
    return stores.back().value;
  }
  std::size_t oldest = at(thread->view, location);
  if (order == std::memory_order_seq_cst) {
    oldest = std::max(oldest, at(total_order_, location));
  }
  std::vector<std::size_t> visible;
  for (std::size_t i = stores.size(); i-- > oldest;) {
    if (!wanted || stores[i].value == *wanted) {
      visible.push_back(i);
    }
  }
  const std::size_t seen = choose(std::move(visible));
  at(thread->view, location) = seen;
  see(location, stores[seen], order);
  note({Kind::load, location, order}, stores[seen].value);
  return stores[seen].value;
}

void Explorer::append(std::size_t location, std::uint64_t value, std::memory_order order) {
  Store made{value, {}, {}};
  if (Thread* thread = current()) {
    at(thread->view, location) = stores_[location].size();
    if (releases(order)) {
      made.view = thread->view;
      made.clock = thread->clock;
    }
    if (order == std::memory_order_seq_cst) {
      at(total_order_, location) = stores_[location].size();
    }
  }
  stores_[location].push_back(std::move(made));
}

void Explorer::store(const Operation& op, std::uint64_t value) {
  append(op.location, value, op.order);
  note(op, value);
}

void Explorer::modify(const Operation& op, bool writes, std::uint64_t value) {
  const Store read = stores_[op.location].back();
  if (Thread* thread = current()) {
    at(thread->view, op.location) = stores_[op.location].size() - 1;
    see(op.location, read, op.order);
  }
  if (writes) {
    append(op.location, value, op.order);
    join(stores_[op.location].back().view, read.view);  // Goes on with its release sequence.
    join(stores_[op.location].back().clock, read.clock);
  }
  note(op, newest(op.location));
}

void Explorer::fence_all_threads() {
  Thread* caller = current();
  if (caller == nullptr) {
    return;
  }
  const View before = caller->view;
  for (const auto& thread : threads_) {
    join(caller->view, thread->view);
    join(thread->view, before);
  }
  join(total_order_, caller->view);
  note({Kind::fence, 0, std::memory_order_seq_cst}, 0);
}

std::size_t Explorer::make_plain() {
  plains_.emplace_back();
  return plains_.size() - 1;
}

void Explorer::read_plain(std::size_t id) {
  if (Thread* thread = current(); thread != nullptr && !gives_up_) {
    PlainAccesses& plain = plains_[id];
    if (plain.writer != kNobody && thread->clock[plain.writer] < plain.written) {
      fail("data race: a value is read, and nothing orders that after its last write");
    }
    plain.read[running_] = thread->clock[running_];
  }
}

void Explorer::write_plain(std::size_t id) {
  if (Thread* thread = current(); thread != nullptr && !gives_up_) {
    PlainAccesses& plain = plains_[id];
    bool is_ordered = plain.writer == kNobody || thread->clock[plain.writer] >= plain.written;
    for (std::size_t reader = 0; reader < plain.read.size(); ++reader) {
      is_ordered = is_ordered && thread->clock[reader] >= plain.read[reader];
    }
    if (!is_ordered) {
      fail("data race: a value is written, and nothing orders that after an earlier access");
    }
    plain.writer = running_;
    plain.written = thread->clock[running_];
  }
}

void Explorer::fail(const std::string& what) { throw std::logic_error(what); }

Explorer& explorer() {
  if (g_explorer == nullptr) {
    throw std::logic_error("objects of the model exist only inside explore()");
  }
  return *g_explorer;
}

}  // namespace

Exploration explore(const std::function<void(Program&)>& make, std::uint64_t max_runs) {
  return Explorer().explore(make, max_runs);
}

void require(bool condition, const char* what) {
  if (!condition && !explorer().is_given_up()) {
    explorer().fail(what);
  }
}

namespace detail {

Location::Location(std::uint64_t value) : id_(explorer().make_location(value)) {}

std::uint64_t Location::load(std::memory_order order) const {
  explorer().announce({Kind::load, id_, order});
  return explorer().load(id_, order);
}

void Location::store(std::uint64_t value, std::memory_order order) {
  const Operation op{Kind::store, id_, order};
  explorer().announce(op);
  explorer().store(op, value);
}

std::uint64_t Location::exchange(std::uint64_t value, std::memory_order order) {
  const Operation op{Kind::exchange, id_, order};
  explorer().announce(op);
  const auto before = explorer().newest(id_);
  explorer().modify(op, true, value);
  return before;
}

std::uint64_t Location::fetch_add(std::uint64_t value, std::memory_order order) {
  const Operation op{Kind::exchange, id_, order};
  explorer().announce(op);
  const auto before = explorer().newest(id_);
  explorer().modify(op, true, before + value);
  return before;
}

bool Location::compare_exchange(std::uint64_t& expected, std::uint64_t desired,
                                std::memory_order order) {
  const Operation op{Kind::compare_exchange, id_, order};
  explorer().announce(op);
  const auto before = explorer().newest(id_);
  const bool exchanges = before == expected;
  explorer().modify(op, exchanges, desired);
  expected = before;
  return exchanges;
}

void Location::await(std::uint64_t value) const {
  explorer().announce({Kind::load, id_, std::memory_order_acquire, Until::kMaySee, value});
  static_cast<void>(explorer().load(id_, std::memory_order_acquire, value));
}

void Location::lock() {
  const Operation op{Kind::lock, id_, std::memory_order_acquire, Until::kNewest, 0};
  explorer().announce(op);
  explorer().modify(op, true, 1);
}

void Location::unlock() {
  const Operation op{Kind::unlock, id_, std::memory_order_release};
  explorer().announce(op);
  explorer().store(op, 0);
}

void fence_all_threads() {
  explorer().announce({Kind::fence, 0, std::memory_order_seq_cst});
  explorer().fence_all_threads();
}

std::size_t make_plain() { return explorer().make_plain(); }
void read_plain(std::size_t id) { explorer().read_plain(id); }
void write_plain(std::size_t id) { explorer().write_plain(id); }

}  // namespace detail

}  // namespace fastamp::interleavings
