// SPDX-License-Identifier: Apache-2.0
// The scripts of tests/data/scaler_scenarios.txt, which the Python scaler runs too.

#include "helpers.h"
#include "support/catch.h"

#include <fastamp/optim/sgd.h>

#include <cstddef>
#include <fstream>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>

using namespace fastamp::test;  // NOLINT(google-build-using-namespace): a test's own helpers

namespace {

using Words = std::vector<std::string>;

struct Scenario {
  std::string name;
  std::vector<Words> script;
};

std::vector<Scenario> read_scenarios() {
  std::vector<Scenario> scenarios;
  std::ifstream table(FASTAMP_TEST_DATA "/scaler_scenarios.txt");
  for (std::string line; std::getline(table, line);) {
    std::istringstream text(line);
    Words words;
    for (std::string word; text >> word;) {
      words.push_back(word);
    }
    if (words.empty() || words[0].front() == '#') {
      continue;
    }
    if (words[0] == "scenario") {
      scenarios.push_back({.name = line.substr(words[0].size() + 1), .script = {}});
    } else {
      scenarios.back().script.push_back(words);
    }
  }
  return scenarios;
}

std::string yes_or_no(bool value) { return value ? "yes" : "no"; }

/// An optimizer over one parameter, at one address for all of its lives.
class Place {
 public:
  explicit Place(bool fused) : fused_(fused) { make(); }
  ~Place() { optimizer_->~Optimizer(); }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  void recreate() {
    optimizer_->~Optimizer();
    make();
  }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  at::Tensor& parameter() { return parameter_; }

 private:
  void make() {
    parameter_ = at::ones({2}).requires_grad_(true);
    const std::vector<at::Tensor> parameters{parameter_};
    if (fused_) {
      optimizer_ = new (memory_) fastamp::optim::SGD(parameters, fastamp::optim::SGDOptions(1.0));
    } else {
      optimizer_ = new (memory_) torch::optim::SGD(parameters, torch::optim::SGDOptions(1.0));
    }
  }

  bool fused_;
  at::Tensor parameter_;
  alignas(std::max_align_t) char memory_[1024];
  torch::optim::Optimizer* optimizer_ = nullptr;
};

static_assert(sizeof(fastamp::optim::SGD) <= 1024 && sizeof(torch::optim::SGD) <= 1024);

/// Runs the lines of a scenario.
class Player {
 public:
  explicit Player(bool fused)
      : scaler_(started(cpu_options().init_scale(4.0).growth_interval(2))), a_(fused), b_(fused) {}

  void run(const Words& words) {
    if (!change(words) && !call(words)) {
      check(words);
    }
  }

 private:
  Place& place(const std::string& name) { return name == "a" ? a_ : b_; }

  bool change(const Words& words) {
    const auto& what = words[0];
    if (what == "only") {
      return true;
    }
    if (what == "backward" || what == "replace") {
      if (what == "backward") {
        scaler_.scale(at::ones({}));
      }
      place(words[1]).parameter().mutable_grad() = at::full({2}, std::stof(words[2]));
      return true;
    }
    if (what == "drop") {
      place(words[1]).parameter().mutable_grad() = at::Tensor();
      return true;
    }
    if (what == "recreate") {
      place(words[1]).recreate();
      return true;
    }
    return false;
  }

  bool call(const Words& words) {
    const auto& what = words[0];
    if (what == "unscale") {
      scaler_.unscale_(place(words[1]).optimizer());
    } else if (what == "step") {
      scaler_.step(place(words[1]).optimizer());
    } else if (what == "clip_norm") {
      scaler_.clip_grad_norm_(place(words[1]).optimizer(), std::stod(words[2]));
    } else if (what == "clip_value") {
      scaler_.clip_grad_value_(place(words[1]).optimizer(), std::stod(words[2]));
    } else if (what == "update_tensor") {
      scaler_.update(at::full({}, std::stod(words[1])));
    } else if (what == "update" && words.size() > 1) {
      scaler_.update(std::stod(words[1]));
    } else if (what == "update") {
      scaler_.update();
    } else if (what == "refused") {
      const auto before = scaler_.get_scale();
      CHECK_THROWS_AS(call({words.begin() + 1, words.end()}), c10::Error);
      CHECK(scaler_.get_scale() == before);
    } else {
      return false;
    }
    return true;
  }

  std::vector<std::string> history() const {
    std::vector<std::string> rows;
    for (const auto& row : scaler_.history()) {
      std::ostringstream text;
      text << row.step << ':' << row.scale << ':' << yes_or_no(row.skipped) << ':'
           << row.growth_tracker;
      rows.push_back(text.str());
    }
    return rows;
  }

  void check(const Words& words) {
    const auto& what = words[0];
    if (what == "scale") {
      CHECK(scaler_.get_scale() == std::stod(words[1]));
      CHECK(scaler_.get_scale_async() == std::stod(words[1]));
    } else if (what == "skipped") {
      CHECK(yes_or_no(scaler_.step_was_skipped()) == words[1]);
    } else if (what == "skipped_of") {
      CHECK(yes_or_no(scaler_.step_was_skipped_for(place(words[1]).optimizer())) == words[2]);
    } else if (what == "history") {
      CHECK(history() == Words(words.begin() + 1, words.end()));
    } else if (what == "report") {
      const auto step = scaler_.overflow_report().step;
      CHECK((step < 0 ? "none" : std::to_string(step)) == words[1]);
    } else if (what == "overflowed") {
      torch::OrderedDict<std::string, at::Tensor> named;
      named.insert("a", a_.parameter());
      named.insert("b", b_.parameter());
      Words names;
      for (const auto& gradient : scaler_.overflow_report(named).gradients) {
        names.push_back(gradient.name);
      }
      CHECK(names == Words(words.begin() + 1, words.end()));
    } else if (what == "grad_below") {
      const auto largest = place(words[1]).parameter().grad().abs().max().item<double>();
      CHECK(largest < std::stod(words[2]));
    } else {
      REQUIRE((what == "grad" || what == "parameter"));
      auto& parameter = place(words[1]).parameter();
      const auto& values = what == "grad" ? parameter.grad() : parameter;
      CHECK(values.detach().eq(std::stod(words[2])).all().item<bool>());
    }
  }

  fastamp::GradScaler scaler_;
  Place a_;
  Place b_;
};

}  // namespace

TEST_CASE("scenarios: every line of the table that Python runs too", "[scaler]") {
  const auto scenarios = read_scenarios();
  REQUIRE(scenarios.size() > 10);
  const bool fused = GENERATE(false, true);
  for (const auto& scenario : scenarios) {
    if (!fused && scenario.script.front() == Words{"only", "fused"}) {
      continue;
    }
    DYNAMIC_SECTION(scenario.name << (fused ? ", fused" : ", torch's")) {
      Player player(fused);
      for (const auto& words : scenario.script) {
        std::string line;
        for (const auto& word : words) {
          line += word + ' ';
        }
        INFO(line);
        player.run(words);
      }
    }
  }
}
