# SPDX-License-Identifier: Apache-2.0
"""The breaks that tools/mutate_kernels.py tries in casts to fp8."""

from __future__ import annotations

from mutant_kinds import Change, Group

SOURCES = ("float8.cu",)
TESTS = ("float8_cast",)

GROUPS = (
    Group(
        "float8_range.cuh",
        SOURCES,
        TESTS,
        (
            Change("magnitudes are not set back", "      *magnitudes = {};\n", ""),
            Change(
                "amax by a plain store",
                "      atomicMax(&magnitudes->amax, thread.seen.amax);",
                "      magnitudes->include(thread.seen);",
            ),
            Change("inf is not handed on", "if (!thread.seen.is_finite()) {", "if (false) {"),
            Change("no barrier before warps are joined", "    __syncthreads();\n", ""),
            Change(
                "warps of other entries are joined",
                "if (warps[i].entry != joined.entry) {",
                "if (false) {",
            ),
            Change(
                "an entry that ends within a warp is lost",
                "      if (lane == 0) {\n        hand_on(thread);\n      }\n",
                "",
            ),
            Change(
                "shuffles reach half the lanes",
                "int step = kWarpSize / 2; step",
                "int step = kWarpSize / 4; step",
            ),
            Change("tail off by one", "    if (tail < n) {", "    if (tail <= n) {"),
            Change("tail left out", "    if (tail < n) {", "    if (false) {"),
            Change("head left out", "    if (lane < head) {", "    if (false) {"),
            Change("second vector unchecked", "i + kWarpSize < vector_count;", "i < vector_count;"),
            Change("second vector is not seen", "      include(seen, b);\n", ""),
            Change("formats exchanged", "== at::kFloat8_e4m3fn;", "!= at::kFloat8_e4m3fn;"),
            Change(
                "scales of 256 entries only",
                "i < table.count; i += kBlockThreads",
                "i < table.count && i < kBlockThreads; i += kBlockThreads",
            ),
        ),
    ),
    Group(
        "float8_tiles.cuh",
        SOURCES,
        TESTS,
        (
            Change("alignment is ignored", "% sizeof(Four<In>) == 0 &&", "% 1 == 0 &&"),
            Change(
                "rows off boundaries of four", "matrix.columns % 4 == 0", "matrix.columns % 2 == 0"
            ),
            Change("inf is cast as if finite", "matrix.scale.is_finite != 0;", "true;"),
            Change(
                "rows beyond the last",
                "if (height_at(matrix, row) == kFloat8TileRows) {",
                "if (true) {",
            ),
            Change(
                "columns beyond the last",
                "    if (row >= matrix.rows || column >= matrix.columns) {\n      return;\n    }\n"
                "    Four",
                "    if (row >= matrix.rows) {\n      return;\n    }\n    Four",
            ),
            Change(
                "single columns beyond the last",
                "    if (row >= matrix.rows || column >= matrix.columns) {\n      return;\n    }\n"
                "    const int",
                "    if (row >= matrix.rows) {\n      return;\n    }\n    const int",
            ),
            Change("tiles of one column", "kFloat8BandColumns * (tile % across)", "0 * tile"),
            Change("bands lie 8 rows apart", "row + lane / 8 * kFloat8TileRows", "row + lane"),
            Change(
                "bytes exchanged",
                "__byte_perm(low_01, low_23, 0x7632)",
                "__byte_perm(low_23, low_01, 0x7632)",
            ),
            Change(
                "words in reverse",
                "{{words.lanes[1], words.lanes[2], words.lanes[3], word}}",
                "{{word, words.lanes[0], words.lanes[1], words.lanes[2]}}",
            ),
            Change(
                "padding is not written",
                "first < kFloat8TileRows; first += 4) {\n      const std::int64_t start",
                "first < height; first += 4) {\n      const std::int64_t start",
            ),
            Change(
                "missing rows are written",
                "if (matrix.row_major != nullptr && first + i < height) {",
                "if (matrix.row_major != nullptr) {",
            ),
            Change(
                "sums of tiles in one row",
                "      float* to = global(matrix.partial + row / kFloat8TileRows * matrix.columns",
                "      float* to = global(matrix.partial",
            ),
            Change(
                "column is read beyond its end",
                "from += i + 1 < missing_from ? matrix.columns : 0;",
                "from += matrix.columns;",
            ),
            Change("bytes of a column over one another", "byte << (i * 8)", "byte"),
            Change("totals in fp32", "  double sum = 0;", "  float sum = 0;"),
            Change("last tile is not summed", "tile < tiles; ++tile", "tile + 1 < tiles; ++tile"),
            Change(
                "totals in reverse",
                "partial[tile * columns",
                "partial[(tiles - 1 - tile) * columns",
            ),
            Change("total beyond the last", "if (column >= columns) {", "if (column > columns) {"),
        ),
    ),
    Group(
        "float8.cu",
        SOURCES,
        TESTS,
        (
            Change(
                "too little memory for sums",
                "static_cast<std::size_t>(count) * sizeof(float)",
                "static_cast<std::size_t>(count) * sizeof(float) / 2",
            ),
            Change("sums of all matrices in one place", "+ starts[i];", "+ starts[0];"),
            Change(
                "too little memory for magnitudes",
                "float8_zeros_bytes(entries.size())",
                "float8_zeros_bytes(0)",
            ),
            Change(
                "empty matrices in between",
                "return entry.rows != 0 && entry.columns != 0;",
                "return entry.rows >= 0;",
                "the cursor hands out an empty range for such an entry, which does nothing",
            ),
        ),
    ),
    Group(
        "float8_copies.cuh",
        SOURCES,
        ("float8_copies",),
        (
            Change("skipped steps are refreshed", "if (!refresh.has_step) {", "if (false) {"),
            Change("every copy stands", "if (refresh.stands) {", "if (true) {"),
            Change(
                "no copy stands",
                "if (refresh.stands) {",
                "if (false) {",
                "a cast by the same scale writes the same bits: only time would show it",
            ),
            Change("inf is cast as finite", "refresh.is_finite ? 1U : 0U", "1U"),
            Change(
                "copies without a transposed one",
                "if (matrix.transposed == nullptr) {",
                "if (false) {",
            ),
            Change("headers stay", "        *header = refresh.header();\n", ""),
            Change(
                "headers of skipped steps are rewritten",
                "      if (refresh.has_step) {",
                "      if (true) {",
            ),
            Change("bands are not distinguished", "row + lane / 8 * kFloat8TileRows,", "row,"),
            Change("columns overlap", "column + lane % 8 * 4)", "column + lane % 8 * 2)"),
        ),
    ),
    Group(
        "float8_tiles.cuh",
        SOURCES,
        ("float8_copies",),
        (
            Change(
                "bands beyond the last row are transposed",
                "    if (row >= matrix.rows || column >= matrix.columns) {\n      return;\n"
                "    }\n    const std::uint8_t* from",
                "    const std::uint8_t* from",
            ),
            Change(
                "squares in another order",
                "columns[k].lanes[i] = square",
                "columns[i].lanes[k] = square",
            ),
        ),
    ),
    Group(
        "step_kernel.cuh",
        ("fused_sgd.cu", "fused_adamw.cu"),
        ("fused_sgd", "fused_adamw"),
        (
            Change("the range is not left", "      leave_amax(amax, done.half, lane);\n", ""),
            Change("skipped steps leave a range", "&& (thread.does & kSteps) != 0) {", ") {"),
        ),
    ),
    Group(
        "step_operands.cuh",
        ("fused_sgd.cu", "fused_adamw.cu"),
        ("fused_sgd", "fused_adamw"),
        (
            Change(
                "lane 0 alone leaves its range",
                "int step = kWarpSize / 2; step > 0; step /= 2",
                "int step = 0; step > 0; step /= 2",
            ),
            Change(
                "the range is stored, not raised",
                "atomicMax(&float8_header(copy)->amax, amax + 1);",
                "float8_header(copy)->amax = amax + 1;",
            ),
            Change("zeros count as no step", "->amax, amax + 1)", "->amax, amax)"),
            Change("inf goes unnoticed", "    atomicMax(&header->not_finite, 1U);\n  }\n", "  }\n"),
            Change("missing elements count", "place.holds(k) ? weight[k] : 0.0F", "weight[k]"),
            Change(
                "fp8 copies are taken for 16 bits",
                "return half_storage == Storage::kFloat8 ? Mix::kFloat8 : Mix::kCopied;",
                "return Mix::kCopied;",
            ),
        ),
    ),
)
