# SPDX-License-Identifier: Apache-2.0
"""The breaks of the fused steps that tools/mutate_kernels.py tries."""

from __future__ import annotations

from mutant_kinds import Change, Group

GROUPS = (
    Group(
        "step_kernel.cuh",
        ("fused_adamw.cu",),
        ("fused_adamw",),
        (
            Change(
                "vectors beyond the end",
                "(range.end - range.begin) / kStepVector * kStepVector",
                "(range.end - range.begin + 3) / kStepVector * kStepVector",
            ),
            Change(
                "moments exchanged",
                "at.moments[m] = table.pointer(kFirst + m, entry);",
                "at.moments[m] = table.pointer(kFirst + (m < 2 ? 1 - m : m), entry);",
            ),
            Change(
                "counters by plain additions",
                "      advance(count);",
                "      *count = next_count(*count);",
            ),
            Change(
                "counters of a skipped step",
                "    if (!args.read().skip) {",
                "    if (true) {",
            ),
            Change(
                "weights follow their copies",
                "at.half != nullptr && !tag.has_copy();",
                "at.half != nullptr;",
            ),
            Change(
                "lane stride",
                "i < stop; i += kWarpSize * kStepVector) {",
                "i < stop; i += kWarpSize) {",
            ),
            Change(
                "lane stride of misaligned arrays",
                "i < end; i += kWarpSize * kStepVector) {",
                "i < end; i += kWarpSize) {",
            ),
            Change(
                "skipped step stores",
                "    if ((thread.does & kSteps) != 0) {\n      store_four",
                "    {\n      store_four",
            ),
            Change(
                "skipped step writes no gradients",
                "    if (thread.does == 0) {",
                "    if ((thread.does & kSteps) == 0) {",
            ),
            Change(
                "skipped step reads for nothing",
                "    if (thread.does == 0) {",
                "    if (false) {",
                "it stores nothing either way: only traffic would show it",
            ),
            Change(
                "gradients are not written",
                "    if ((thread.does & kWritesGrads) != 0) {\n      place.store",
                "    if (false) {\n      place.store",
            ),
            Change(
                "hyperparameters of the last group",
                "if (group != thread.group || steps != thread.steps) {",
                "if (steps != thread.steps) {",
            ),
            Change(
                "hyperparameters of the last step count",
                "if (group != thread.group || steps != thread.steps) {",
                "if (group != thread.group) {",
            ),
            Change(
                "bf16 moments as the usual fp32 ones",
                "if (kNoisy || at.moment_storage != Storage::kFloat) {",
                "if (kNoisy) {",
            ),
            Change(
                "remainders of misaligned arrays as masters",
                "if (again.remainders) {",
                "if (false) {",
            ),
            Change(
                "first moments always rounded by noise",
                "if (m > 0 || Op::noisy_first(thread.element)) {",
                "if (true) {",
            ),
            Change(
                "first moments never rounded by noise",
                "if (m > 0 || Op::noisy_first(thread.element)) {",
                "if (m > 0) {",
            ),
            Change(
                "first moments with the noise of second ones",
                "own.of_moment(index, static_cast<std::size_t>(m))",
                "own.of_moment(index, 1)",
            ),
            Change(
                "elements of turned memory with the noise of their places",
                "const auto index = kTurned ?",
                "const auto index = false ?",
            ),
            Change(
                "counters stand still at 2^24",
                "bits_of(next_count(from_bits(assumed)))",
                "bits_of(from_bits(assumed) + 1.0F)",
            ),
            Change(
                "all elements of a lane with one noise",
                ": static_cast<std::uint32_t>(place.index(k));",
                ": static_cast<std::uint32_t>(place.index(0));",
            ),
            Change(
                "the noise of another step",
                "Noise::at(origin, thread.steps)",
                "Noise::at(origin, thread.steps + 1.0F)",
            ),
            Change(
                "moments of an unused list are loaded",
                "raw[m] = held ? place.load",
                "raw[m] = true ? place.load",
            ),
        ),
    ),
    Group(
        "step_operands.cuh",
        ("fused_adamw.cu",),
        ("fused_adamw",),
        (
            Change(
                "no alignment check",
                "  return address % bytes == 0;  // null is",
                "  return address % 2 == 0 || storage == Storage::kFloat || bytes == 0;",
            ),
            Change(
                "16-bit gradients as the usual fp32 ones",
                "if (!usual || wide == follows) {",
                "if (!usual || (wide && follows)) {",
            ),
            Change(
                "amsgrad as the usual moments",
                "(moments[m] != nullptr) == (m < usual_moments)",
                "(moments[m] != nullptr || m >= usual_moments)",
            ),
            Change(
                "copies are not written by their loop",
                ": kMix != Mix::kFloat) {",
                ": kMix == Mix::kMaster) {",
            ),
            Change(
                "remainders as masters",
                "    return remainders ? Mix::kRemainder : Mix::kMaster;",
                "    return Mix::kMaster;",
            ),
            Change(
                "remainders of the weights before the step",
                "remainders[k] = static_cast<std::uint16_t>(remainder);",
                "remainders[k] = 0;",
            ),
        ),
    ),
    Group(
        "step_codes.cuh",
        ("fused_adamw.cu",),
        ("fused_adamw",),
        (
            Change(
                "lanes of 64",
                "/ kStepVector;\n    const std::uint32_t first =",
                "/ 2;\n    const std::uint32_t first =",
            ),
            Change(
                "a scale for each lane",
                "unsigned step = lanes / 2; step > 0; step /= 2",
                "unsigned step = 0; step > 0; step /= 2",
            ),
            Change(
                "a scale of half a group",
                "unsigned step = lanes / 2; step > 0; step /= 2",
                "unsigned step = lanes / 4; step > 0; step /= 2",
            ),
            Change(
                "scales exchanged",
                "      scale[0] = static_cast<std::uint8_t>(first_scale);",
                "      scale[0] = static_cast<std::uint8_t>(second_scale);",
            ),
            Change(
                "the first scale of another group",
                "decode<FirstMomentCodes>(first, scale[0], moments[0]);",
                "decode<FirstMomentCodes>(first, scale[1], moments[0]);",
            ),
            Change("first moments always by noise", "noisy_first ? First", "true ? First"),
            Change("first moments never by noise", "noisy_first ? First", "false ? First"),
            Change("one noise for four", "place.index(k)", "place.index(0)"),
            Change(
                "lanes beyond the end step",
                "four<kMix>(Neighbours{own}, own < range.end, amax);",
                "four<kMix>(Neighbours{own}, true, amax);",
            ),
            Change("a skipped step encodes", "    if (!steps) {\n      return;\n    }\n", ""),
            Change("a skipped step stores weights", "    if (steps) {\n", "    if (true) {\n"),
            Change("gradients are not written", "    if (writes_grads) {\n", "    if (false) {\n"),
            Change(
                "misaligned arrays as aligned ones", "      if (aligned) {\n", "      if (true) {\n"
            ),
            Change(
                "lane stride",
                "i < range.end; i += kWarpSize * kStepVector",
                "i < range.end; i += kWarpSize",
            ),
            Change("scales are written while others read them", "    __syncwarp();\n", ""),
            Change("all lanes write their group's scales", "if (is_first_of_group(place)) {", "{"),
            Change("magnitudes with their signs", "bits_of(in[k]) & 0x7fffffffU", "bits_of(in[k])"),
        ),
    ),
    Group(
        "step_access.cuh",
        ("fused_adamw.cu",),
        ("fused_adamw",),
        (
            Change(
                "high half of a pair is lost",
                "quad.words[k / 2] >> (16 * (k % 2))",
                "quad.words[k / 2] >> (16 * (k % 1))",
            ),
            Change(
                "half of a quad's pairs",
                "quad.words[1] = pair.words[1];",
                "quad.words[1] = pair.words[0];",
            ),
            Change(
                "misaligned elements with the noise of their neighbours",
                "int k) const { return at + k * kWarpSize; }",
                "int k) const { return at + k; }",
            ),
            Change("elements behind the last", "k * kWarpSize < left", "true || k < left"),
            Change("last element is left out", "k * kWarpSize < left", "k * kWarpSize < left - 1"),
            Change(
                "misaligned halves one apart",
                "to[k * kWarpSize] = to_bits(in[k], storage);",
                "to[k] = to_bits(in[k], storage);",
            ),
        ),
    ),
    Group(
        "step_launch.cuh",
        ("fused_adamw.cu",),
        ("fused_adamw",),
        (
            Change(
                "groups are not renumbered", "(entry.group - first))", "(entry.group + 1) % 32)"
            ),
            Change("second launch is left out", "first < groups.size(); first", "first < 1; first"),
            Change(
                "entries of other groups too",
                "entry.group < first || entry.group >= first + kLaunchGroups",
                "entry.group < first",
            ),
        ),
    ),
    Group(
        "muon.cu",
        ("muon.cu",),
        ("muon",),
        (
            Change("no alignment check", "    if (at.aligned()) {", "    if (true) {"),
            Change(
                "vectors beyond the end",
                "(range.end - range.begin) / kStepVector * kStepVector;",
                "(range.end - range.begin + 3) / kStepVector * kStepVector;",
            ),
            Change(
                "lane stride",
                "i < stop;\n           i += cuda::kWarpSize * kStepVector) {",
                "i < stop;\n           i += cuda::kWarpSize) {",
            ),
            Change(
                "lane stride of misaligned arrays",
                "i < range.end; i += cuda::kWarpSize * kStepVector) {",
                "i < range.end; i += cuda::kWarpSize) {",
            ),
            Change(
                "skipped step stores momentum",
                "    if (steps) {\n      store_buffer(",
                "    {\n      store_buffer(",
            ),
            Change(
                "updates of a skipped step",
                "update[k] = steps ? update[k] : 0.0F;",
                "update[k] = update[k] + 0.0F;",
            ),
            Change(
                "gradients of a skipped step are not read",
                "steps || thread.writes_grads;",
                "steps;",
            ),
            Change(
                "constants of the first group",
                "tag.group() != thread.group",
                "thread.group == ~0U",
            ),
            Change(
                "second launch is left out",
                "first < groups.size(); first",
                "first < 1; first",
            ),
        ),
    ),
)
