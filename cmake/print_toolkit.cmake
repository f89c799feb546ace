# cmake -DPython3_EXECUTABLE=... -P print_toolkit.cmake: fails where no CUDA toolkit fits torch.
cmake_minimum_required(VERSION 3.25)
set(CMAKE_CXX_COMPILER c++)
set(CMAKE_BINARY_DIR "$ENV{TMPDIR}")
if(NOT CMAKE_BINARY_DIR)
  set(CMAKE_BINARY_DIR /tmp)
endif()
execute_process(
  COMMAND
    "${Python3_EXECUTABLE}" -c
    "import importlib.util as u, os, runpy\np = u.find_spec('torch').origin\nprint(runpy.run_path(os.path.join(os.path.dirname(p), 'version.py')).get('cuda') or '')"
  OUTPUT_VARIABLE cuda_version
  OUTPUT_STRIP_TRAILING_WHITESPACE
  COMMAND_ERROR_IS_FATAL ANY
)
include("${CMAKE_CURRENT_LIST_DIR}/FastampCudaToolkit.cmake")
fastamp_find_cuda_toolkit("${cuda_version}" root origin)
if(NOT root)
  message(FATAL_ERROR "no toolkit of CUDA ${cuda_version} on this machine")
endif()
message(STATUS "CUDA ${cuda_version}: ${origin}")
