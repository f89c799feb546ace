# Decides whether the CUDA part is built, and with what; include() after FastampTorch.
#
# In:  FASTAMP_CUDA=AUTO|ON|OFF, CMAKE_CUDA_COMPILER (wins over every search), CMAKE_CUDA_ARCHITECTURES,
#      TORCH_CUDA_ARCH_LIST (variable or environment)
# Out: FASTAMP_BUILD_CUDA_VERSION and FASTAMP_BUILD_CUDA_ARCHS, empty for a CPU-only build;
#      FASTAMP_HAVE_CUDA; if ON: language CUDA enabled and fastamp_torch::cuda, which brings
#      libtorch_cuda, libc10_cuda and torch's own CUDA runtime
include("${CMAKE_CURRENT_LIST_DIR}/FastampCudaArchitectures.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/FastampCudaToolkit.cmake")
set(
  FASTAMP_CUDA
  AUTO
  CACHE STRING
  "Build the CUDA part: AUTO (if torch and a toolkit allow), ON, OFF"
)
set_property(CACHE FASTAMP_CUDA PROPERTY STRINGS AUTO ON OFF)

# The runtime that torch itself loads, by its path, so that RPATHs name torch's folders; a second
# runtime beside torch's would keep streams and errors of its own.
function(_fastamp_cuda_runtime)
  if(TARGET fastamp_torch::cudart)
    return()
  endif()
  set(runtime "")
  foreach(dir IN ITEMS "${FASTAMP_TORCH_DIR}" ${FASTAMP_WHEEL_CUDA_DIRS})
    file(GLOB found "${dir}/lib/libcudart.so.*" "${dir}/lib/libcudart-*.so.*")
    list(APPEND runtime ${found})
  endforeach()
  if(NOT runtime)
    add_library(fastamp_torch::cudart INTERFACE IMPORTED GLOBAL)
    target_link_libraries(fastamp_torch::cudart INTERFACE CUDA::cudart)
    return()
  endif()
  list(GET runtime 0 runtime)
  add_library(fastamp_torch::cudart SHARED IMPORTED GLOBAL)
  set_target_properties(
    fastamp_torch::cudart
    PROPERTIES
      IMPORTED_LOCATION "${runtime}"
      INTERFACE_INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}"
      INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}"
  )
endfunction()

function(_fastamp_cuda_targets)
  if(TARGET fastamp_torch::cuda)
    return()
  endif()
  _fastamp_cuda_runtime()
  foreach(name IN ITEMS c10_cuda torch_cuda)
    fastamp_add_torch_library(${name})
  endforeach()
  add_library(fastamp_torch::cuda INTERFACE IMPORTED GLOBAL)
  # libtorch_cuda registers torch's CUDA kernels when it is loaded: C++ programs need it even
  # though no symbol of it may be used, so the linker must not drop it.
  set(keep "$<TARGET_FILE:fastamp_torch::torch_cuda>" "$<TARGET_FILE:fastamp_torch::c10_cuda>")
  list(JOIN keep "," keep)
  target_link_libraries(
    fastamp_torch::cuda
    INTERFACE
      fastamp_torch::cpu
      fastamp_torch::torch_cuda
      fastamp_torch::c10_cuda
      "-Wl,--push-state,--no-as-needed,${keep},--pop-state"
      fastamp_torch::cudart
  )
  target_compile_options(
    fastamp_torch::cuda
    INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--expt-extended-lambda>"
  )
  # As torch's own extension builder: half arithmetic is spelt out, never through CUDA's operators.
  target_compile_definitions(
    fastamp_torch::cuda
    INTERFACE
      "$<$<COMPILE_LANGUAGE:CUDA>:__CUDA_NO_HALF_OPERATORS__;__CUDA_NO_HALF_CONVERSIONS__;__CUDA_NO_HALF2_OPERATORS__;__CUDA_NO_BFLOAT16_CONVERSIONS__>"
  )
endfunction()

set(FASTAMP_HAVE_CUDA OFF)
set(FASTAMP_BUILD_CUDA_VERSION "")
set(FASTAMP_BUILD_CUDA_ARCHS "")
if(NOT FASTAMP_CUDA STREQUAL "OFF" AND FASTAMP_TORCH_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    fastamp_find_cuda_toolkit(
      "${FASTAMP_TORCH_CUDA}"
      _fastamp_root
      _fastamp_origin
      ${FASTAMP_WHEEL_CUDA_DIRS}
    )
    if(_fastamp_root)
      set(CMAKE_CUDA_COMPILER "${_fastamp_root}/bin/nvcc" CACHE FILEPATH "" FORCE)
      set(CUDAToolkit_ROOT "${_fastamp_root}" CACHE PATH "" FORCE)
    endif()
  else()
    set(_fastamp_origin "compiler given: ${CMAKE_CUDA_COMPILER}")
  endif()
  if(CMAKE_CUDA_COMPILER)
    # Kept for later runs of CMake, which find the compiler in the cache.
    set(FASTAMP_CUDA_ORIGIN "${_fastamp_origin}" CACHE STRING "Where the CUDA toolkit comes from")
    # With find_package(Torch) before us, torch has put its -gencode flags in CMAKE_CUDA_FLAGS.
    if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT CMAKE_CUDA_FLAGS MATCHES "-gencode|-arch")
      fastamp_default_architectures(_fastamp_archs)
      set(CMAKE_CUDA_ARCHITECTURES "${_fastamp_archs}" CACHE STRING "" FORCE)
    endif()
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}" CACHE FILEPATH "")
    enable_language(CUDA)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION) # CMake 3.25 knows no C++20 of nvcc's
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_RUNTIME_LIBRARY None) # linked by hand, see _fastamp_cuda_runtime
    find_package(CUDAToolkit ${FASTAMP_TORCH_CUDA} REQUIRED)
    _fastamp_cuda_targets()
    set(FASTAMP_HAVE_CUDA ON)
    set(FASTAMP_BUILD_CUDA_VERSION "${FASTAMP_TORCH_CUDA}")
    set(FASTAMP_BUILD_CUDA_ARCHS "${CMAKE_CUDA_ARCHITECTURES}")
  endif()
endif()

if(FASTAMP_HAVE_CUDA)
  message(
    STATUS
    "fastamp: CUDA ${FASTAMP_TORCH_CUDA} build for ${CMAKE_CUDA_ARCHITECTURES}, "
    "${FASTAMP_CUDA_ORIGIN}, torch ${FASTAMP_TORCH_VERSION} in ${FASTAMP_TORCH_DIR}"
  )
elseif(FASTAMP_CUDA STREQUAL "ON")
  message(
    FATAL_ERROR
    "fastamp: FASTAMP_CUDA=ON, but there is no toolkit of CUDA '${FASTAMP_TORCH_CUDA}' for torch "
    "${FASTAMP_TORCH_VERSION}. CUDACXX=/path/to/bin/nvcc names one that is not found. For one from "
    "Python packages, from CUDA 13 on: python3 -m pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl]' of "
    "the cuda-toolkit version that 'pip list' shows"
  )
else()
  if(FASTAMP_CUDA STREQUAL "OFF")
    set(_fastamp_why "FASTAMP_CUDA=OFF")
  elseif(FASTAMP_TORCH_CUDA)
    set(_fastamp_why "no toolkit of torch's CUDA ${FASTAMP_TORCH_CUDA}")
  else()
    set(_fastamp_why "torch has no CUDA")
  endif()
  message(
    STATUS
    "fastamp: CPU-only build (${_fastamp_why}), "
    "torch ${FASTAMP_TORCH_VERSION} in ${FASTAMP_TORCH_DIR}"
  )
endif()
