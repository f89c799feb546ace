// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trace/recorder.h"

#include <string>
#include <vector>

namespace fastamp::python {

/// Finds the innermost Python frame of this thread outside the folders to be skipped, and the
/// module whose forward pass runs; empty in backward threads. Runs no Python code. Takes the GIL.
autocast::CallSite python_call_site();

/// Frames of files in these folders (absolute, with a final separator) are not the user's.
void skip_source_folders(std::vector<std::string> folders);

}  // namespace fastamp::python
