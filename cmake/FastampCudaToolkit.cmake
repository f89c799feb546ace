# Finds a CUDA toolkit of exactly torch's major.minor that can compile a kernel.
#
# The order: the compiler the user names, the system's toolkits, then the one that Python packages
# bring ("cuda-toolkit[nvcc,crt,nvvm,cccl]"). Nothing is downloaded here.
include_guard(GLOBAL)

# Compiles one kernel with the headers that ATen's CUDA headers include. This alone shows a usable
# toolkit from one with missing libraries' headers, and from Python packages of mixed versions.
function(_fastamp_probe_nvcc nvcc cuda_version out_root)
  set(${out_root} "" PARENT_SCOPE)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(NOT version MATCHES "release ([0-9]+\\.[0-9]+)" OR NOT CMAKE_MATCH_1 STREQUAL cuda_version)
    message(STATUS "fastamp: ${nvcc} is CUDA '${CMAKE_MATCH_1}', torch has ${cuda_version}")
    return()
  endif()
  set(probe "${CMAKE_BINARY_DIR}/fastamp_probe")
  set(
    headers
    cuda_runtime.h
    cublas_v2.h
    cusparse.h
    cusolverDn.h
    nv/target
    cub/cub.cuh
  )
  list(TRANSFORM headers REPLACE "(.+)" "#include <\\1>\n")
  list(JOIN headers "" headers)
  file(
    WRITE "${probe}.cu"
    "${headers}__global__ void k(float* p) { *p = 1; }\nvoid f(float* p) { k<<<1, 1>>>(p); }\n"
  )
  # -v prints the root that nvcc found for itself, through wrapper scripts and links.
  execute_process(
    COMMAND
      "${nvcc}" -v -ccbin "${CMAKE_CXX_COMPILER}" -std=c++17 -arch=sm_80 -c "${probe}.cu" -o
      "${probe}.o"
    RESULT_VARIABLE failed
    OUTPUT_VARIABLE log
    ERROR_VARIABLE log
  )
  if(failed OR NOT log MATCHES "#\\$ TOP=([^\r\n]*)")
    string(SUBSTRING "${log}" 0 2000 log)
    message(STATUS "fastamp: ${nvcc} cannot compile a kernel, passed over:\n${log}")
    return()
  endif()
  get_filename_component(root "${CMAKE_MATCH_1}" REALPATH)
  set(${out_root} "${root}" PARENT_SCOPE)
endfunction()

# The Python packages have lib/ and no lib64/, libX.so.N and no libX.so, where nvcc and the linker
# want the latter. nvcc takes its root from the folder it is CALLED from, so bin/ must be a folder
# of links and not a link.
function(_fastamp_link_wheel_toolkit dest)
  file(REMOVE_RECURSE "${dest}")
  foreach(root IN LISTS ARGN)
    foreach(sub IN ITEMS bin include lib nvvm)
      file(MAKE_DIRECTORY "${dest}/${sub}")
      file(GLOB entries "${root}/${sub}/*")
      foreach(entry IN LISTS entries)
        get_filename_component(name "${entry}" NAME)
        if(NOT EXISTS "${dest}/${sub}/${name}")
          file(CREATE_LINK "${entry}" "${dest}/${sub}/${name}" SYMBOLIC)
        endif()
        # Two ifs: the arguments of one are all expanded before it matches.
        if(name MATCHES "^(lib[^.]+\\.so)\\.[0-9]+$")
          if(NOT EXISTS "${dest}/lib/${CMAKE_MATCH_1}")
            file(CREATE_LINK "${entry}" "${dest}/lib/${CMAKE_MATCH_1}" SYMBOLIC)
          endif()
        endif()
      endforeach()
    endforeach()
  endforeach()
  file(CREATE_LINK lib "${dest}/lib64" SYMBOLIC)
endfunction()

function(_fastamp_system_toolkit cuda_version out_root)
  find_program(nvcc_in_path nvcc NO_CACHE)
  set(
    candidates
    "$ENV{CUDACXX}"
    "$ENV{CUDA_HOME}/bin/nvcc"
    "$ENV{CUDA_PATH}/bin/nvcc"
    "${nvcc_in_path}"
    "/usr/local/cuda-${cuda_version}/bin/nvcc"
    "/usr/local/cuda/bin/nvcc"
  )
  list(REMOVE_DUPLICATES candidates)
  foreach(nvcc IN LISTS candidates)
    if(IS_ABSOLUTE "${nvcc}" AND EXISTS "${nvcc}")
      _fastamp_probe_nvcc("${nvcc}" "${cuda_version}" root)
      if(root)
        set(${out_root} "${root}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(${out_root} "" PARENT_SCOPE)
endfunction()

# fastamp_find_cuda_toolkit(<major.minor> <out root> <out origin> [<folder of Python packages>...])
#
# root is "" when there is none; origin says in words where it comes from. Costs a few seconds once:
# a configured build keeps its compiler.
function(fastamp_find_cuda_toolkit cuda_version out_root out_origin)
  _fastamp_system_toolkit("${cuda_version}" root)
  set(origin "system toolkit ${root}")
  set(links "${CMAKE_BINARY_DIR}/cuda-from-python")
  set(wheel_nvcc "")
  foreach(dir IN LISTS ARGN)
    if(EXISTS "${dir}/bin/nvcc")
      set(wheel_nvcc "${dir}/bin/nvcc")
    endif()
  endforeach()
  if(NOT root AND wheel_nvcc)
    _fastamp_link_wheel_toolkit("${links}" ${ARGN})
    _fastamp_probe_nvcc("${links}/bin/nvcc" "${cuda_version}" root)
    if(root)
      # Not the real folder behind the links: it has no lib64/ and no libX.so.
      set(root "${links}")
      set(origin "toolkit from Python packages ${wheel_nvcc}")
    endif()
  endif()
  set(${out_root} "${root}" PARENT_SCOPE)
  set(${out_origin} "${origin}" PARENT_SCOPE)
endfunction()
