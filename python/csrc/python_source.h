// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace fastamp::python {

/// "file:line" of the innermost Python frame of this thread outside the folders to be skipped;
/// empty if there is none, as in backward threads. Takes the GIL.
std::string python_source();

/// Frames of files in these folders (absolute, with a final separator) are not the user's.
void skip_source_folders(std::vector<std::string> folders);

}  // namespace fastamp::python
