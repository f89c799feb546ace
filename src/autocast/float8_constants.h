// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

// Every constant of the model that predicts the time of products (float8_rule.h), with its source.
// `python -m benchmarks.fit_float8_rule` measures on a GPU and rewrites that GPU's entry; what does
// not name it as its source was not measured by this project.
namespace fastamp::autocast {

/// sm_89 is the first with fp8 products.
inline constexpr int kFirstFloat8Capability = 89;

/// A GPU, as far as the model knows it. Rates are what products and casts reach, not peaks.
struct Float8Gpu {
  std::string_view name;
  std::string_view driver_name;  ///< Empty in kOtherFloat8Gpus.
  int capability;                ///< 90 for 9.0.
  int multiprocessors;
  double carrier_rate;    ///< FLOP/s of a product in 16 bits.
  double float8_rate;     ///< FLOP/s of a product in fp8.
  double bandwidth;       ///< Bytes/s of a cast, read and written.
  double launch_seconds;  ///< From the end of a kernel to the begin of the next one.
  double min_work;  ///< FLOP of y below which the host takes longer to launch than the GPU to run.
};

inline constexpr std::array kFloat8Gpus{
    // carrier_rate: assumed, that of the H200 SXM, which is the same chip. float8_rate: fitted to
    // the 1137 TFLOP/s of cuBLAS at 8192^3 in issue 155507 of pytorch. bandwidth: assumed, the H200
    // SXM's share of a peak of 3.35 TB/s. launch_seconds, min_work: assumed.
    Float8Gpu{.name = "H100 SXM",
              .driver_name = "NVIDIA H100 80GB HBM3",
              .capability = 90,
              .multiprocessors = 132,
              .carrier_rate = 800e12,
              .float8_rate = 1220e12,
              .bandwidth = 2.58e12,
              .launch_seconds = 2.5e-6,
              .min_work = 2e10},
    // carrier_rate: assumed, of published products of 757 TFLOP/s at 8192^3. float8_rate: assumed,
    // 1.75 times as fast. bandwidth: assumed, of copies at 77 % of the peak. launch_seconds,
    // min_work: assumed.
    Float8Gpu{.name = "H200 SXM",
              .driver_name = "NVIDIA H200",
              .capability = 90,
              .multiprocessors = 132,
              .carrier_rate = 800e12,
              .float8_rate = 1400e12,
              .bandwidth = 3.7e12,
              .launch_seconds = 2.5e-6,
              .min_work = 2e10},
    // carrier_rate, float8_rate, bandwidth: fitted to the table of a transformer layer's products
    // (K and N of 4096 to 16384, M of 15872) in the documentation of NVIDIA's Transformer Engine.
    // launch_seconds, min_work: assumed.
    Float8Gpu{.name = "H200 NVL",
              .driver_name = "NVIDIA H200 NVL",
              .capability = 90,
              .multiprocessors = 132,
              .carrier_rate = 635e12,
              .float8_rate = 1240e12,
              .bandwidth = 3.55e12,
              .launch_seconds = 2.5e-6,
              .min_work = 2e10},
};

/// What a GPU without an entry is taken for: the last line whose capability it has. Rates are those
/// of one multiprocessor, bandwidth is a share of the memory's peak.
///
/// All assumed, so that gains are rather too small: 16 bits as fast as on the best published part
/// of the kind (L40S, H200 SXM, B200, RTX PRO 6000), fp8 far from twice as fast, slow casts.
inline constexpr std::array kOtherFloat8Gpus{
    Float8Gpu{"other sm_89", "", kFirstFloat8Capability, 1, 2.5e12, 3.75e12, 0.7, 2.5e-6, 2e10},
    Float8Gpu{"other sm_90", "", 90, 1, 6.1e12, 9.15e12, 0.7, 2.5e-6, 2e10},
    Float8Gpu{"other sm_100", "", 100, 1, 12e12, 18e12, 0.7, 2.5e-6, 4e10},
    Float8Gpu{"other sm_120", "", 120, 1, 2.5e12, 3.75e12, 0.7, 2.5e-6, 2e10},
};

/// Bytes/s of one multiprocessor where the driver does not tell the memory's peak. Assumed, below
/// that of every GPU with fp8.
inline constexpr double kUnknownBandwidth = 5e9;

/// The part of the result that a multiprocessor computes at a time.
struct Float8Tile {
  std::int64_t rows;
  std::int64_t columns;
  double cost;  ///< Time of an element; that of the best tile is 1.
};

/// Assumed: tiles of known kernels for sm_90.
inline constexpr std::array kFloat8Tiles{Float8Tile{128, 256, 1.0}, Float8Tile{256, 128, 1.0},
                                         Float8Tile{128, 128, 1.12}};

/// The share of the last wave's idle time that splitting does not hide. Fitted with the H200 NVL.
inline constexpr double kTailShare = 0.5;

/// The share of a product's traffic that computing does not hide. Fitted with the H200 NVL.
inline constexpr double kTrafficShare = 0.5;

}  // namespace fastamp::autocast
