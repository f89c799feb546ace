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
                "no alignment check",
                "  return address % (storage == Storage::kFloat ? 16 : 8) == 0;  // null is",
                "  return address % 2 == 0 || storage == Storage::kFloat;",
            ),
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
            Change("counters by plain additions", "atomicAdd(count, 1.0F);", "*count += 1.0F;"),
            Change(
                "counters of a skipped step",
                "    if (args.read().skip) {\n      return;\n    }\n#",
                "#",
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
                "i < range.end; i += kWarpSize * kStepVector) {",
                "i < range.end; i += kWarpSize) {",
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
                "it stores nothing either way: only traffic would tell",
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
                "bf16 moments as the usual fp32 ones",
                "      if (at.moment_storage == Storage::kFloat) {",
                "      if (true) {",
            ),
            Change(
                "copies are not written by their loop",
                ": kMix != Mix::kFloat) {",
                ": kMix == Mix::kMaster) {",
            ),
            Change(
                "moments of an unused list are loaded",
                "raw[m] = held ? place.load",
                "raw[m] = true ? place.load",
            ),
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
)
