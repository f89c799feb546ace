#pragma once

namespace fastamp::ops {

/// Whether a call of one of our ops with ordinary CPU tensors would run its CPU kernel and nothing
/// else: no dispatch mode, functorch level, tracer or profiler of this thread wants to see it. The
/// kernel may be called without the dispatcher then, with what the caller knows of its arguments
/// besides. ADInplaceOrView is not counted: the caller bumps versions.
bool nothing_watches_calls();

}  // namespace fastamp::ops
