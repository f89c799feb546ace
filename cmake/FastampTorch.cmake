# Finds torch and makes fastamp_torch::cpu, fastamp_torch::python and, for what programs load,
# fastamp_torch::runtime from its files.
#
# find_package(Torch) is never called: with a CUDA build of torch it stops unless a CUDA toolkit is
# there, even when nothing of CUDA is compiled. This file is installed beside fastampConfig.cmake,
# so programs that use fastamp find torch in the same way.
#
# In:  a `torch` target, Torch_DIR, CMAKE_PREFIX_PATH (a LibTorch folder, torch's share/cmake), else
#      the torch of Python3_EXECUTABLE (or of the python3 that CMake finds)
# Out: FASTAMP_TORCH_DIR       folder that holds include/ and lib/
#      FASTAMP_TORCH_VERSION   "2.11.0"
#      FASTAMP_TORCH_CUDA      "13.0", or "" for a torch without CUDA
#      FASTAMP_TORCH_CXX       "17", "20": the C++ that its headers ask for
#      FASTAMP_WHEEL_CUDA_DIRS folders of the CUDA packages for Python that go with this torch
#      FASTAMP_TORCH_ERROR     why there is no torch; empty on success
include_guard(DIRECTORY)

# A folder is torch's if it holds what we compile and link against.
function(_fastamp_torch_root dir out)
  set(${out} "" PARENT_SCOPE)
  get_filename_component(dir "${dir}" ABSOLUTE)
  foreach(root IN ITEMS "${dir}" "${dir}/../.." "${dir}/../../..")
    if(EXISTS "${root}/lib/libtorch_cpu.so" AND EXISTS "${root}/include/ATen/core/Tensor.h")
      get_filename_component(root "${root}" REALPATH)
      set(${out} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# The torch a C++ program names itself; no Python is looked for.
function(_fastamp_torch_from_cmake out)
  set(places "${Torch_DIR}" "${Torch_ROOT}" "$ENV{Torch_DIR}" "$ENV{Torch_ROOT}")
  if(TARGET torch)
    get_target_property(includes torch INTERFACE_INCLUDE_DIRECTORIES)
    foreach(include IN LISTS includes)
      list(APPEND places "${include}/..")
    endforeach()
  endif()
  string(REPLACE ":" ";" prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(place IN LISTS places CMAKE_PREFIX_PATH prefixes)
    if(place AND EXISTS "${place}")
      _fastamp_torch_root("${place}" root)
      if(root)
        set(${out} "${root}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

# The torch of a Python interpreter, found without importing it (0.05 s instead of 2 s).
function(_fastamp_torch_from_python out_root out_nvidia out_error)
  set(${out_root} "" PARENT_SCOPE)
  set(${out_nvidia} "" PARENT_SCOPE)
  if(NOT Python3_EXECUTABLE)
    find_package(Python3 3.10 QUIET COMPONENTS Interpreter)
  endif()
  if(NOT Python3_EXECUTABLE)
    set(${out_error} "no torch in CMAKE_PREFIX_PATH and no Python to ask for one" PARENT_SCOPE)
    return()
  endif()
  set(
    script
    "import importlib.util as u, os"
    "t, n = u.find_spec('torch'), u.find_spec('nvidia')"
    "print(os.path.dirname(t.origin) if t else '')"
    "print('|'.join(n.submodule_search_locations) if n else '')"
  )
  list(JOIN script "\n" script)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c "${script}"
    RESULT_VARIABLE failed
    OUTPUT_VARIABLE output
    ERROR_VARIABLE errors
  )
  if(failed)
    set(${out_error} "${Python3_EXECUTABLE}: ${errors}" PARENT_SCOPE)
    return()
  endif()
  string(REGEX MATCH "^([^\n]*)\n([^\n]*)" _ "${output}")
  set(dir "${CMAKE_MATCH_1}")
  string(REPLACE "|" ";" nvidia "${CMAKE_MATCH_2}")
  if(NOT dir)
    set(${out_error} "no torch in CMAKE_PREFIX_PATH and none in ${Python3_EXECUTABLE}" PARENT_SCOPE)
    return()
  endif()
  _fastamp_torch_root("${dir}" root)
  set(${out_root} "${root}" PARENT_SCOPE)
  set(${out_nvidia} "${nvidia}" PARENT_SCOPE)
  set(${out_error} "" PARENT_SCOPE)
endfunction()

# Release, CUDA version and C++ standard as torch's own headers state them: true for wheels and
# LibTorch folders.
function(_fastamp_torch_facts root out_version out_cuda out_cxx)
  set(version "")
  set(cuda "")
  set(cxx "17")
  foreach(
    header
    IN
    ITEMS include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h
  )
    if(NOT version AND EXISTS "${root}/${header}")
      file(STRINGS "${root}/${header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
      list(JOIN numbers "." version)
    endif()
  endforeach()
  if(EXISTS "${root}/lib/libtorch_cuda.so" AND EXISTS "${root}/include/caffe2/core/macros.h")
    file(STRINGS "${root}/include/caffe2/core/macros.h" lines REGEX "\"CUDA_VERSION\"")
    string(REGEX MATCH "[0-9]+\\.[0-9]+" cuda "${lines}")
  endif()
  if(EXISTS "${root}/include/ATen/ATen.h")
    file(STRINGS "${root}/include/ATen/ATen.h" lines REGEX "#error C\\+\\+[0-9]+ or later")
    if(lines MATCHES "C\\+\\+([0-9]+) or later")
      set(cxx "${CMAKE_MATCH_1}")
    endif()
  endif()
  set(${out_version} "${version}" PARENT_SCOPE)
  set(${out_cuda} "${cuda}" PARENT_SCOPE)
  set(${out_cxx} "${cxx}" PARENT_SCOPE)
endfunction()

# fastamp_torch::<name> for torch's lib<name>.so, with its headers as system headers.
function(fastamp_add_torch_library name)
  if(TARGET fastamp_torch::${name})
    return()
  endif()
  set(include "${FASTAMP_TORCH_DIR}/include")
  set(includes "${include}" "${include}/torch/csrc/api/include")
  add_library(fastamp_torch::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(
    fastamp_torch::${name}
    PROPERTIES
      IMPORTED_LOCATION "${FASTAMP_TORCH_DIR}/lib/lib${name}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${includes}"
      INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${includes}"
      INTERFACE_COMPILE_FEATURES cxx_std_${FASTAMP_TORCH_CXX}
  )
endfunction()

function(_fastamp_torch_targets)
  if(TARGET fastamp_torch::cpu)
    return()
  endif()
  foreach(name IN ITEMS c10 torch_cpu torch_python)
    fastamp_add_torch_library(${name})
  endforeach()
  add_library(fastamp_torch::cpu INTERFACE IMPORTED GLOBAL)
  target_link_libraries(fastamp_torch::cpu INTERFACE fastamp_torch::torch_cpu fastamp_torch::c10)
  add_library(fastamp_torch::python INTERFACE IMPORTED GLOBAL)
  target_link_libraries(
    fastamp_torch::python
    INTERFACE fastamp_torch::torch_python fastamp_torch::cpu
  )
  # No symbol of libtorch.so is called, so linkers leave it out. Programs need it all the same: it
  # brings torch's CUDA part, and what torch compiles (AOTInductor's packages) depends on it and
  # finds it only in the process: a program's RUNPATH does not apply to what its libraries load.
  add_library(fastamp_torch::runtime INTERFACE IMPORTED GLOBAL)
  target_link_options(
    fastamp_torch::runtime
    INTERFACE "LINKER:--push-state,--no-as-needed,${FASTAMP_TORCH_DIR}/lib/libtorch.so,--pop-state"
  )
endfunction()

set(FASTAMP_TORCH_ERROR "")
set(_fastamp_nvidia "")
_fastamp_torch_from_cmake(FASTAMP_TORCH_DIR)
if(NOT FASTAMP_TORCH_DIR)
  _fastamp_torch_from_python(FASTAMP_TORCH_DIR _fastamp_nvidia FASTAMP_TORCH_ERROR)
endif()
if(FASTAMP_TORCH_DIR)
  _fastamp_torch_facts(
    "${FASTAMP_TORCH_DIR}"
    FASTAMP_TORCH_VERSION
    FASTAMP_TORCH_CUDA
    FASTAMP_TORCH_CXX
  )
  string(REGEX MATCH "^[0-9]+" _fastamp_cuda_major "${FASTAMP_TORCH_CUDA}")
  set(FASTAMP_WHEEL_CUDA_DIRS "")
  foreach(_fastamp_dir IN ITEMS "${FASTAMP_TORCH_DIR}/../nvidia" ${_fastamp_nvidia})
    if(_fastamp_cuda_major AND IS_DIRECTORY "${_fastamp_dir}/cu${_fastamp_cuda_major}")
      get_filename_component(_fastamp_dir "${_fastamp_dir}/cu${_fastamp_cuda_major}" REALPATH)
      list(APPEND FASTAMP_WHEEL_CUDA_DIRS "${_fastamp_dir}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES FASTAMP_WHEEL_CUDA_DIRS)
  _fastamp_torch_targets()
endif()
