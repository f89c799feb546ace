// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <benchmark/benchmark.h>

/// Names every benchmark "row|candidate"; the candidates of a row take turns. Each program has one.
void register_benchmarks();
