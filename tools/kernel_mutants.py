# SPDX-License-Identifier: Apache-2.0
"""The breaks that tools/mutate_kernels.py tries: what, where, and which tests must notice.

Here those of passes over gradients, casts and host plans; tools/step_mutants.py has the fused
steps'. A break that no test can notice says why. Add one for each new kernel's barriers, bounds and
tails.
"""

from __future__ import annotations

from mutant_kinds import Change, Group

GROUPS = (
    Group(
        "last_block.cuh",
        ("squares_launch.cu",),
        ("norm",),
        (
            Change(
                "no barrier before the fence",
                "  __shared__ bool last;\n  __syncthreads();\n",
                "  __shared__ bool last;\n",
            ),
            Change(
                "no fence before the increment", "    __threadfence();\n    last =", "    last ="
            ),
            Change(
                "no fence after the increment",
                "gridDim.x - 1;\n    __threadfence();\n",
                "gridDim.x - 1;\n",
            ),
            Change(
                "fence before the barrier",
                "  __syncthreads();\n  if (threadIdx.x == 0) {\n    __threadfence();\n",
                "  if (threadIdx.x == 0) {\n    __threadfence();\n  }\n  __syncthreads();\n"
                "  if (threadIdx.x == 0) {\n",
            ),
            Change("no barrier after", "  }\n  __syncthreads();\n  return", "  }\n  return"),
            Change("counter wraps one late", "(arrivals, gridDim.x - 1)", "(arrivals, gridDim.x)"),
            Change("the first block instead", "== gridDim.x - 1;", "== 0;"),
            Change("flag is not shared", "  __shared__ bool last;", "  bool last = false;"),
        ),
    ),
    Group(
        "squares.cuh",
        ("squares_launch.cu",),
        ("norm",),
        (
            Change(
                "no barrier in the tree",
                "      __syncthreads();\n      if (threadIdx.x < width) {",
                "      if (threadIdx.x < width) {",
            ),
            Change(
                "barrier in a branch",
                "      __syncthreads();\n      if (threadIdx.x < width) {\n",
                "      if (threadIdx.x < width) {\n        __syncthreads();\n",
            ),
            Change(
                "tree starts too wide",
                "unsigned width = kBlockThreads / 2;",
                "unsigned width = kBlockThreads;",
            ),
            Change("tree ends a step early", "width > 0; width /= 2", "width > 1; width /= 2"),
            Change(
                "seen is cleared while it is read",
                "    __syncthreads();  // all threads have read `seen`\n",
                "",
            ),
            Change("seen is not cleared", "      zeros->seen = 0;\n", ""),
            Change(
                "shuffles reach half the lanes",
                "unsigned step = kWarpSize / 2; step",
                "unsigned step = kWarpSize / 4; step",
            ),
            Change("sum of a run is not reset", "    thread.squares = 0.0;\n", ""),
            Change(
                "every lane stores the sum of a run",
                "    if (lane == 0) {\n      partial[run]",
                "    if (lane >= 0) {\n      partial[run]",
            ),
            Change(
                "vote in a divergent branch",
                "      if (__any_sync(kAllLanes, static_cast<int>(!safe)) == 0) {",
                "      if (safe || __any_sync(kAllLanes, static_cast<int>(!safe)) == 0) {",
            ),
            Change(
                "counts by plain additions",
                "      atomicAdd(row, static_cast<unsigned long long>(sums.inf));",
                "      *row += static_cast<unsigned long long>(sums.inf);",
            ),
            Change("seen by a plain store", "atomicExch(&zeros->seen, 1U);", "zeros->seen = 1U;"),
            Change(
                "found_inf is never lowered",
                "(non_finite || overwrite_found_inf)",
                "non_finite",
            ),
            Change(
                "found_inf is always overwritten",
                "    if (threadIdx.x == 0 && (non_finite || overwrite_found_inf)) {",
                "    if (threadIdx.x == 0) {",
            ),
            Change("counts do not rest at zero", "      *word = 0;\n", ""),
            Change("tail off by one", "    if (tail < n) {", "    if (tail <= n) {"),
            Change(
                "misaligned data as vectors",
                "(data) % 16 == 0) {",
                "(data) % 4 == 0) {",
            ),
            Change(
                "second vector unchecked",
                "i + kWarpSize < vector_count; i += 2",
                "i < vector_count; i += 2",
            ),
            Change(
                "misaligned vector holds one element",
                "vec.lanes[k] = at[k];",
                "vec.lanes[k] = at[0];",
            ),
            Change(
                "single last vector left out", "      if (i < vector_count) {", "      if (false) {"
            ),
            Change("inf counted as NaN", "inf += is_nan ? 0U : 1U;", "nan += is_nan ? 0U : 1U;"),
            Change("products are not checked", "safe_squares(*inv_scale)", "safe_squares(1.0F)"),
            Change(
                "a norm beyond fp32 is an overflow",
                "      recount(sums, base, range, lane);\n",
                "      sums.inf = 1;\n",
            ),
            Change(
                "clipping factor is not checked",
                "non_finite |= !norm.write(sums[0], *inv_scale);",
                "norm.write(sums[0], *inv_scale);",
            ),
            Change(
                "recount begins at the tensor",
                "std::int64_t i = range.begin + lane; i",
                "std::int64_t i = lane; i",
            ),
            Change(
                "last chunk of a range is read whole",
                "static_cast<int>(remainder < kNormChunkNumel ? remainder : kNormChunkNumel)",
                "static_cast<int>(kNormChunkNumel)",
            ),
            Change("rows one word apart", "(this + 1) + 2 * i;", "(this + 1) + i;"),
        ),
    ),
    Group(
        "squares.cuh",
        ("squares_launch.cu",),
        ("unscale_norm",),
        (
            Change(
                "stores although the factor is 1",
                "if (kWrites && Unscale<float>{factor}.rewrites()) {",
                "if (kWrites) {",
                "the stored bits are those that were read: only traffic would show it",
            ),
            Change(
                "first vector of two is not stored",
                "        store(vectors + i, a, factor);\n        store(vectors + i + k",
                "        store(vectors + i + k",
            ),
            Change(
                "misaligned vector is not stored",
                "      store(at + k, vec.lanes[k], factor);\n",
                "",
            ),
            Change(
                "double is read as bfloat16",
                "        if constexpr (kWrites) {\n          run(thread, static_cast<double*>",
                "        if constexpr (kWrites) {\n          run(thread, "
                "static_cast<c10::BFloat16*>",
            ),
        ),
    ),
    Group(
        "squares_launch.cu",
        ("squares_launch.cu",),
        ("norm", "workspace"),
        (
            Change(
                "one partial sum too few",
                "std::size_t{runs} * sizeof(double)",
                "std::size_t{runs - 1} * sizeof(double)",
            ),
            Change(
                "too little memory for the counts",
                "counted ? list.listed : 0), stream",
                "counted ? list.listed / 512 : 0), stream",
            ),
            Change("row of the entry, not of the list", "zeros->row(grad.index)", "zeros->row(0)"),
        ),
    ),
    Group(
        "unscale.cu",
        ("unscale.cu",),
        ("unscale",),
        (
            Change(
                "only what is read is checked",
                "magnitude_bits(product) >= kOverflowBits<scalar_t>",
                "is_non_finite(static_cast<opmath_t>(element))",
            ),
            Change("head of the wrong length", "(kVec - past), n)", "(past), n)"),
            Change(
                "head longer than the range",
                "min(static_cast<std::int64_t>(kVec - past), n)",
                "static_cast<std::int64_t>(kVec - past)",
            ),
            Change("tail off by one", "    if (tail < n) {", "    if (tail <= n) {"),
            Change("tail left out", "    if (tail < n) {", "    if (false) {"),
            Change(
                "second vector unchecked",
                "i + cuda::kWarpSize < vector_count;",
                "i < vector_count;",
            ),
            Change(
                "flag of thread 0 alone",
                "__syncthreads_or(static_cast<int>(thread.non_finite)) != 0 && threadIdx.x == 0",
                "thread.non_finite && threadIdx.x == 0",
            ),
            Change(
                "flag by a plain store",
                "      ::cuda::atomic_ref<float, ::cuda::thread_scope_device>(*found_inf)\n"
                "          .store(1.0F, ::cuda::memory_order_relaxed);",
                "      *found_inf = 1.0F;",
            ),
            Change("second vector is not updated", "      update(thread, b);\n", ""),
        ),
    ),
    Group(
        "multi_tensor.cuh",
        ("test_multi_tensor.cpp", "unscale.cu"),
        ("multi_tensor", "unscale"),
        (
            Change(
                "all warps of a block do the same",
                "blockIdx.x * kBlockWarps + threadIdx.x / kWarpSize",
                "blockIdx.x * kBlockWarps",
            ),
            Change(
                "a worker begins a chunk late",
                "apply_to_chunks(op, thread, table, part_begin(chunks, worker, workers),",
                "apply_to_chunks(op, thread, table, part_begin(chunks, worker, workers) + 1,",
            ),
            Change(
                "every block finishes",
                "    if (last_to_arrive(op.arrivals)) {",
                "    last_to_arrive(op.arrivals);\n    if (true) {",
            ),
            Change(
                "a range is left out",
                "    while (cursor.next(range)) {",
                "    if (cursor.next(range)) {",
            ),
        ),
    ),
    Group(
        "launch_plan.h",
        ("test_multi_tensor.cpp", "unscale.cu"),
        ("multi_tensor", "unscale"),
        (
            Change(
                "cursor starts an entry early",
                "table.first_chunk[middle] <= begin",
                "table.first_chunk[middle] < begin",
            ),
            Change(
                "last chunk is not cut to the tensor",
                "    range.end = range.end < numel ? range.end : numel;\n",
                "    static_cast<void>(numel);\n",
            ),
            Change(
                "part numbers in 32 bits",
                "static_cast<std::uint64_t>(total) * part / parts",
                "total * part / parts",
            ),
            Change(
                "elements in 32 bits",
                "static_cast<std::int64_t>(at_ - first) * kChunkNumel",
                "static_cast<std::int64_t>((at_ - first) * "
                "static_cast<std::uint32_t>(kChunkNumel))",
            ),
            Change(
                "numel loses its high bits",
                "(packed & ((std::uint64_t{1} << 48U) - 1))",
                "(packed & ((std::uint64_t{1} << 32U) - 1))",
            ),
        ),
    ),
    Group(
        "launch_plan.cpp",
        ("launch_plan.cpp",),
        ("multi_tensor", "tables"),
        (
            Change("no block for what finishes", "std::max(plan.blocks, 1U)", "plan.blocks"),
            Change(
                "large table one entry too long",
                "count > capacity.large",
                "count > capacity.large + 1000",
            ),
            Change(
                "old drivers get large arguments",
                " || !device.large_arguments",
                "",
            ),
            Change(
                "small table too long", "count > capacity.small", "count > capacity.small + 1000"
            ),
        ),
    ),
    Group(
        "launch_table.h",
        ("unscale.cu", "test_multi_tensor.cpp"),
        ("unscale", "tables", "multi_tensor"),
        (
            Change(
                "bound behind the last entry is missing",
                "  table.first_chunk[entries.size()] = chunk;\n",
                "",
            ),
            Change("the same in device memory", "  first_chunk[count] = chunk;\n", ""),
            Change(
                "first chunks lie an entry early",
                "const auto* first_chunk = words + (kDepth + 1) * count;",
                "const auto* first_chunk = words + kDepth * count;",
            ),
        ),
    ),
    Group(
        "dense_cast.cu",
        ("dense_cast.cu",),
        ("cast",),
        (
            Change("alignment is ignored", "aligned ? n / 8 : 0", "n / 8 + (aligned ? 0 : 0)"),
            Change(
                "elements behind the last eight",
                "i = groups * 8 + lane; i",
                "i = groups * 8 + lane + 1; i",
            ),
            Change("dtypes exchanged", "== at::kHalf) {", "== at::kBFloat16) {"),
        ),
    ),
    Group(
        "upload.cu",
        ("upload.cu",),
        ("tables",),
        (
            Change(
                "pinned memory freed too early",
                "  host_allocator->record_event(pinned.get(), pinned.get_context(), "
                "stream.unwrap());\n",
                "",
            ),
            Change(
                "copies under capture",
                "== c10::cuda::CaptureStatus::None) {",
                "!= static_cast<c10::cuda::CaptureStatus>(7)) {",
            ),
            Change(
                "a word short",
                "(n + sizeof(std::uint32_t) - 1) / sizeof(std::uint32_t)",
                "n / sizeof(std::uint32_t) - 1",
            ),
            Change(
                "pinned memory refused during another capture",
                "  const c10::cuda::CUDAStreamCaptureModeGuard "
                "guard(cudaStreamCaptureModeRelaxed);\n",
                "",
            ),
            Change(
                "large parcels with an old driver",
                "takes_large_arguments() ? upload_by_kernels<kUploadBytes>",
                "true ? upload_by_kernels<kUploadBytes>",
            ),
            Change(
                "second parcel over the first",
                "static_cast<unsigned char*>(to) + at)",
                "static_cast<unsigned char*>(to) + 0 * at)",
            ),
        ),
    ),
    Group(
        "zeroed_workspace.cpp",
        ("zeroed_workspace.cpp",),
        ("workspace", "tables"),
        (
            Change(
                "not cleared in a graph",
                "    C10_CUDA_CHECK(cudaMemsetAsync(memory_, 0, bytes, stream));\n",
                "",
            ),
            Change(
                "a stream's memory in a graph",
                "currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None",
                "currentStreamCaptureStatusMayInitCtx() != "
                "static_cast<c10::cuda::CaptureStatus>(7)",
            ),
            Change(
                "streams share it",
                "{stream.device_index(), stream.id()}",
                "{stream.device_index(), 0}",
            ),
            Change(
                "new memory is not cleared",
                "    C10_CUDA_CHECK(cudaMemsetAsync(memory, 0, enough, stream));\n",
                "",
            ),
            Change("does not grow", "if (block.bytes < bytes) {", "if (block.bytes == 0) {"),
            Change(
                "refused during another capture",
                "  const c10::cuda::CUDAStreamCaptureModeGuard "
                "guard(cudaStreamCaptureModeRelaxed);\n",
                "",
            ),
        ),
    ),
    Group(
        "norm.cpp",
        ("norm.cpp",),
        ("norm",),
        (
            Change(
                "counts are not asked for",
                "mutable_pointer<std::int64_t>(args.non_finite_counts)",
                "nullptr",
            ),
            Change("writes its gradients", "cuda::sum_squares(", "cuda::unscale_and_sum_squares("),
        ),
    ),
    Group(
        "exponents.cu",
        ("exponents.cu",),
        ("exponents",),
        (
            Change("no barrier after clearing", "    __syncwarp();  // the zeros are there\n", ""),
            Change(
                "no barrier after counting", "    __syncwarp();  // all lanes have counted\n", ""
            ),
            Change(
                "no barrier before the next range",
                "    __syncwarp();  // all lanes have read, before the next range clears\n",
                "",
            ),
            Change(
                "warps share their counts",
                "bins_of_warps[threadIdx.x / cuda::kWarpSize]",
                "bins_of_warps[0]",
            ),
            Change(
                "counts are not atomic",
                "atomicAdd(bins + exponent_column(bits), 1U);",
                "bins[exponent_column(bits)] += 1U;",
            ),
            Change(
                "the last columns are not cleared",
                "i < kExponentBins; i += cuda::kWarpSize) {\n      bins[i] = 0;",
                "i < kExponentBins - 2; i += cuda::kWarpSize) {\n      bins[i] = 0;",
            ),
            Change(
                "the table is not written atomically",
                "        atomicAdd(row + i, static_cast<Word>(bins[i]));\n",
                "        row[i] += static_cast<Word>(bins[i]);\n",
            ),
            Change("0 is the least", "bits != 0 && bits < least", "bits < least"),
        ),
    ),
)
