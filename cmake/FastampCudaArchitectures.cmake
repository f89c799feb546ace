# Which GPUs to compile for.
include_guard(GLOBAL)

# "8.0;9.0+PTX;9.0a" as torch's builds write it -> "80-real;90;90a-real" as CMake does.
function(fastamp_cmake_architectures torch_list out)
  string(REGEX REPLACE "[ ,]+" ";" torch_list "${torch_list}")
  set(result "")
  foreach(arch IN LISTS torch_list)
    if(NOT arch MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(
        FATAL_ERROR
        "fastamp: TORCH_CUDA_ARCH_LIST: expected entries like 9.0, 9.0a or 9.0+PTX, "
        "got '${arch}'"
      )
    endif()
    set(name "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
    if(NOT CMAKE_MATCH_4)
      string(APPEND name "-real")
    endif()
    list(APPEND result "${name}")
  endforeach()
  set(${out} "${result}" PARENT_SCOPE)
endfunction()

# What to compile for: the user's list, else the GPUs of this machine, else a list for releases.
function(fastamp_default_architectures out)
  set(archs "${TORCH_CUDA_ARCH_LIST}")
  if(NOT archs)
    set(archs "$ENV{TORCH_CUDA_ARCH_LIST}")
  endif()
  find_program(nvidia_smi nvidia-smi NO_CACHE)
  if(NOT archs AND nvidia_smi)
    execute_process(
      COMMAND "${nvidia_smi}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE gpus
      ERROR_QUIET
    )
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" archs "${gpus}")
    list(REMOVE_DUPLICATES archs)
  endif()
  if(NOT archs)
    set(archs 8.0 9.0+PTX)
  endif()
  fastamp_cmake_architectures("${archs}" archs)
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()
