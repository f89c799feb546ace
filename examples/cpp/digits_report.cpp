// SPDX-License-Identifier: Apache-2.0
#include "digits_report.h"

#include "digits_table.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>

namespace digits {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kWarmUp = 10;       // iterations that are not timed, if there are more
constexpr std::int64_t kCheckEvery = 100;  // iterations between two looks at the loss

std::string name_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "fp32";
    case c10::ScalarType::BFloat16:
      return "bf16";
    case c10::ScalarType::Half:
      return "fp16";
    default:
      return c10::toString(dtype);
  }
}

void reset_peak_memory(c10::Device device) {
  if (device.is_cuda()) {
    at::accelerator::resetPeakStats(0);
  } else {
    std::ofstream("/proc/self/clear_refs") << '5';
  }
}

// The peak of CUDA tensors, or of the whole process (RSS, libraries included).
std::optional<double> peak_memory_mib(c10::Device device) {
  if (device.is_cuda()) {
    const auto stats = at::accelerator::getDeviceStats(0).allocated_bytes;
    return static_cast<double>(stats[0].peak) / 1048576.0;
  }
  if (access("/proc/self/clear_refs", W_OK) != 0) {
    return std::nullopt;
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) {
      return std::stod(line.substr(6)) / 1024;
    }
  }
  return std::nullopt;
}

std::int64_t iterations_of(const Options& options, const std::string& mode) {
  const auto fewer = options.shorter.find(mode);
  return fewer == options.shorter.end() ? options.iters : std::min(options.iters, fewer->second);
}

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

Row::Row(const Options& options, c10::Device device, const std::string& mode, bool scaled)
    : options_(options),
      device_(device),
      mode_(mode + (scaled ? " + GradScaler" : "")),
      scaled_(scaled),
      total_(iterations_of(options, mode)),
      begun_(Clock::now()),
      started_(begun_),
      shown_(begun_) {
  reset_peak_memory(device);
}

void Row::wait() const {
  if (device_.is_cuda()) {
    torch::cuda::synchronize();
  }
}

void Row::record(const at::Tensor& loss) {
  loss_ = loss.detach();
  ++iteration_;
}

bool Row::goes_on() {
  if (std::find(options_.marks.begin(), options_.marks.end(), iteration_) != options_.marks.end()) {
    losses_[iteration_] = loss_.item<double>();
  }
  if (iteration_ == std::min(kWarmUp, total_ - 1)) {
    wait();
    started_ = Clock::now();
    timed_from_ = iteration_;
  }
  bool over = iteration_ >= total_;
  const bool check = iteration_ % kCheckEvery == 0;
  if (check || iteration_ == 1) {
    shown_loss_ = loss_.item<double>();
    over = over || (check && shown_loss_ <= options_.until_loss);
  }
  if (over) {
    wait();
    ms_per_iteration_ =
        1e3 * seconds(Clock::now() - started_) / static_cast<double>(iteration_ - timed_from_);
    peak_mib_ = peak_memory_mib(device_);
  }
  show_progress(over);
  return !over;
}

void Row::show_progress(bool last) {
  static const bool terminal = isatty(STDERR_FILENO) != 0;
  const auto now = Clock::now();
  if (!last && seconds(now - shown_) < (terminal ? 0.1 : 5.0)) {
    return;
  }
  shown_ = now;
  constexpr int kWidth = 20;
  const double share = static_cast<double>(iteration_) / static_cast<double>(total_);
  const int filled = static_cast<int>(share * kWidth);
  std::string bar(kWidth, ' ');
  std::fill_n(bar.begin(), filled, '#');
  std::fprintf(stderr, "\rC++ %s |%s| %lld/%lld %.0fs loss=%.6f%s", mode_.c_str(), bar.c_str(),
               static_cast<long long>(iteration_), static_cast<long long>(total_),
               seconds(now - begun_), shown_loss_, last ? "\n" : "");
}

void Row::finish(const SeenDtypes& seen, const at::Tensor& accuracy, double scale,
                 std::int64_t skipped) {
  seen_ = seen;
  accuracy_ = accuracy.item<double>();
  final_loss_ = loss_.item<double>();
  scale_ = scale;
  skipped_ = skipped;
}

std::vector<std::pair<std::string, std::string>> Row::cells() const {
  std::vector<std::pair<std::string, std::string>> cells = {
      {"mode", mode_},
      {"fc1 input", name_of(seen_.input)},
      {"fc1 output", name_of(seen_.output)},
      {"fc1 weight", name_of(seen_.weight)},
  };
  for (const auto mark : options_.marks) {
    if (mark <= options_.iters) {
      const auto loss = losses_.find(mark);
      cells.emplace_back("loss @" + short_number(mark),
                         loss == losses_.end() ? "" : format("%.6f", loss->second));
    }
  }
  cells.emplace_back("final loss", format("%.6f", final_loss_));
  const auto fewer = total_ < options_.iters ? " of " + std::to_string(options_.iters) : "";
  cells.emplace_back("iterations", std::to_string(iteration_) + fewer);
  cells.emplace_back("accuracy", format("%.4f", accuracy_));
  cells.emplace_back("final scale", scaled_ ? format("%g", scale_) : "-");
  cells.emplace_back("skipped", scaled_ ? std::to_string(skipped_) : "-");
  cells.emplace_back("ms/iter", format("%.2f", ms_per_iteration_));
  cells.emplace_back(device_.is_cuda() ? "peak CUDA MiB" : "peak RSS MiB",
                     peak_mib_ ? format("%.0f", *peak_mib_) : "n/a");
  return cells;
}

std::string Row::json() const {
  std::ostringstream out;
  out.precision(17);
  out << R"({"mode": ")" << mode_ << R"(", "input": ")" << name_of(seen_.input)
      << R"(", "output": ")" << name_of(seen_.output) << R"(", "weight": ")"
      << name_of(seen_.weight) << R"(", "losses": {)";
  const char* separator = "";
  for (const auto& [mark, loss] : losses_) {
    out << separator << '"' << mark << R"(": )" << loss;
    separator = ", ";
  }
  out << R"(}, "final_loss": )" << final_loss_ << R"(, "iterations": )" << iteration_
      << R"(, "accuracy": )" << accuracy_ << R"(, "ms_per_iteration": )" << ms_per_iteration_
      << R"(, "scale": )" << (scaled_ ? format("%.17g", scale_) : "null") << R"(, "skipped": )"
      << (scaled_ ? std::to_string(skipped_) : "null") << R"(, "peak_mib": )"
      << (peak_mib_ ? format("%.1f", *peak_mib_) : "null") << '}';
  return out.str();
}

Report::Report(Options options, c10::Device device)
    : options_(std::move(options)), device_(device) {
  std::cout << "C++, LibTorch " << TORCH_VERSION << ": ";
  if (device.is_cuda()) {
    std::cout << "training on " << device << '\n' << std::flush;
  } else {
    std::cout << "no CUDA GPU, training on the CPU (" << at::get_num_threads() << " threads)\n"
              << "fp16 is slow on CPUs without fp16 arithmetic of their own,\n"
              << "fp8 on all: there it shows what a GPU would compute\n"
              << std::flush;
  }
}

Row& Report::add_row(const std::string& mode, bool scaled) {
  return rows_.emplace_back(options_, device_, mode, scaled);
}

void Report::print() const {
  Table table;
  for (const auto& row : rows_) {
    table.push_back(row.cells());
  }
  print_table(table);
  if (options_.json.empty()) {
    return;
  }
  std::ofstream file(options_.json);
  file << R"({"language": "C++", "device": ")" << c10::DeviceTypeName(device_.type(), true)
       << R"(", "rows": [)";
  const char* separator = "\n ";
  for (const auto& row : rows_) {
    file << separator << row.json();
    separator = ",\n ";
  }
  file << "\n]}\n";
  TORCH_CHECK(file.flush(), "cannot write ", options_.json);
}

}  // namespace digits
