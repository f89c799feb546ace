// SPDX-License-Identifier: Apache-2.0
#include "autocast/float8_rule.h"

#include "autocast/float8_constants.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace fastamp::autocast {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// A sum of what kernels do one after the other.
class Timeline {
 public:
  explicit Timeline(const Float8Gpu& gpu) : gpu_(gpu) {}

  double seconds() const { return seconds_; }
  double launches() const { return launches_; }

  /// A kernel that reads and writes this much.
  void move(double bytes) {
    seconds_ += bytes / gpu_.bandwidth + gpu_.launch_seconds;
    ++launches_;
  }
  /// The range of `count` elements is found, then they are cast: read twice, and `copies` written.
  void cast_to_float8(double count, double item_bytes, int copies) {
    move(count * item_bytes);
    move(count * (item_bytes + copies));
  }
  /// The same with a predicted scale: read once, and a launch that finds that the cast stands.
  void cast_by_prediction(double count, double item_bytes, int copies) {
    move(count * (item_bytes + copies));
    move(0);
  }
  /// @param work     FLOP, as float8_product_work() counts them.
  /// @param traffic  Bytes of the operands, and of the result in 16 bits.
  void multiply(double work, double rate, double traffic) {
    const double moving = traffic / gpu_.bandwidth;
    seconds_ += std::max(work / rate + kTrafficShare * moving, moving) + gpu_.launch_seconds;
    ++launches_;
  }
  /// What a product writes beyond 16 bits: nothing hides it.
  void write_more(double bytes) { seconds_ += bytes / gpu_.bandwidth; }

 private:
  const Float8Gpu& gpu_;
  double seconds_ = 0;
  double launches_ = 0;
};

class Predictor {
 public:
  Predictor(const Float8Gpu& gpu, const Float8Shape& shape, c10::ScalarType carrier,
            Float8Scale scale)
      : gpu_(gpu),
        shape_(shape),
        carrier_(gpu),
        float8_(gpu),
        carrier_dtype_(carrier),
        scale_(scale) {}

  Float8Prediction predict() {
    add_products();
    add_carrier_casts();
    add_float8_casts();
    const double quotient = carrier_.seconds() / float8_.seconds();
    const bool waits = 2.0 * x_count_ * static_cast<double>(shape_.n) < gpu_.min_work;
    return {
        .carrier_seconds = carrier_.seconds(),
        .float8_seconds = float8_.seconds(),
        .gain = waits ? std::min(quotient, carrier_.launches() / float8_.launches()) : quotient};
  }

 private:
  static double bytes_of(c10::ScalarType dtype) { return static_cast<double>(elementSize(dtype)); }

  void add_products() {
    const auto [m, k, n] = std::array{shape_.m, shape_.k, shape_.n};
    add_product(m, n, k);
    if (shape_.x_gradient) {
      add_product(m, k, n);
      float8_.write_more((x_bytes_ - 2) * x_count_);
    }
    if (shape_.weight_gradient) {
      add_product(n, k, m);
      float8_.write_more((weight_bytes_ - 2) * weight_count_);
    }
  }

  /// [rows, depth] times [depth, columns], in both ways.
  void add_product(std::int64_t rows, std::int64_t columns, std::int64_t depth) {
    const auto out = static_cast<double>(rows) * static_cast<double>(columns);
    const auto in =
        (static_cast<double>(rows) + static_cast<double>(columns)) * static_cast<double>(depth);
    const double work = float8_product_work(rows, columns, depth, gpu_.multiprocessors);
    carrier_.multiply(work, gpu_.carrier_rate, 2 * in + 2 * out);
    float8_.multiply(work, gpu_.float8_rate, in + 2 * out);
  }

  /// Operands are cast to the carrier, gradients back; the bias's gradient is a pass over dY.
  void add_carrier_casts() {
    if (shape_.x_dtype != carrier_dtype_) {
      carrier_.move((x_bytes_ + 2) * x_count_);
      if (shape_.x_gradient) {
        carrier_.move((x_bytes_ + 2) * x_count_);
      }
    }
    if (shape_.weight_dtype != carrier_dtype_) {
      carrier_.move((weight_bytes_ + 2) * weight_count_);
      if (shape_.weight_gradient) {
        carrier_.move((weight_bytes_ + 2) * weight_count_);
      }
    }
    if (shape_.has_bias && shape_.weight_gradient) {
      carrier_.move(2 * y_count_);
    }
  }

  /// One copy for y, another for the gradient that reads the operand transposed.
  void add_float8_casts() {
    cast_activation(x_count_, x_bytes_, 1 + int{shape_.weight_gradient});
    float8_.cast_to_float8(weight_count_, weight_bytes_, 1 + int{shape_.x_gradient});
    const int gradients = int{shape_.x_gradient} + int{shape_.weight_gradient};
    if (gradients != 0) {
      cast_activation(y_count_, 2, gradients);
    }
  }

  void cast_activation(double count, double item_bytes, int copies) {
    if (scale_ == Float8Scale::predicted) {
      float8_.cast_by_prediction(count, item_bytes, copies);
    } else {
      float8_.cast_to_float8(count, item_bytes, copies);
    }
  }

  const Float8Gpu& gpu_;
  const Float8Shape& shape_;
  Timeline carrier_;
  Timeline float8_;
  c10::ScalarType carrier_dtype_;
  Float8Scale scale_;
  double x_count_ = static_cast<double>(shape_.m) * static_cast<double>(shape_.k);
  double weight_count_ = static_cast<double>(shape_.n) * static_cast<double>(shape_.k);
  double y_count_ = static_cast<double>(shape_.m) * static_cast<double>(shape_.n);
  double x_bytes_ = bytes_of(shape_.x_dtype);
  double weight_bytes_ = bytes_of(shape_.weight_dtype);
};

}  // namespace

Float8Prediction predict_float8(const Float8Gpu& gpu, const Float8Shape& shape,
                                c10::ScalarType carrier, Float8Scale scale) {
  return Predictor(gpu, shape, carrier, scale).predict();
}

double float8_product_work(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                           int multiprocessors) {
  auto padded = std::numeric_limits<double>::infinity();
  for (const Float8Tile& tile : kFloat8Tiles) {
    const auto tiles = ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns);
    const auto area = ceil_div(tiles, multiprocessors) * multiprocessors * tile.rows * tile.columns;
    padded = std::min(padded, static_cast<double>(area) * tile.cost);
  }
  const double ideal = static_cast<double>(rows) * static_cast<double>(columns);
  const double counted = std::max(kTailShare * padded + (1 - kTailShare) * ideal, ideal);
  return 2 * counted * static_cast<double>(depth);
}

}  // namespace fastamp::autocast
