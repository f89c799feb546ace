# fastamp_add_test(<name> SOURCES <file>... [LABELS <label>...] [CUDA] [WITHOUT_TORCH])
#
# One Catch2 executable, fastamp_test_<name>, and one ctest entry. Not one entry per test case: each
# process loads libtorch. CUDA: the executable exits with 77 where there is no device, and ctest
# reports it as skipped. CATCH2_INCLUDE: folder with catch2/catch.hpp, where Catch2 is not installed.
# WITHOUT_TORCH: sources that include next to nothing of torch, for which precompiled headers of
# torch cost more than they save.
#
# Where Catch2 is missing, configuring fails; with FASTAMP_BUILD_TESTS=AUTO it sets
# FASTAMP_TESTS_LEFT_OUT to the reason instead (tools/cmake_build.py reads it), and there are no tests.
include_guard(GLOBAL)
set(CATCH2_INCLUDE "" CACHE PATH "Folder that holds catch2/catch.hpp, if Catch2 is not installed")
set(
  FASTAMP_TESTS_LEFT_OUT
  ""
  CACHE INTERNAL
  "Why there are no C++ tests though AUTO asked for them"
)
if(NOT CATCH2_INCLUDE)
  find_package(Catch2 QUIET)
  if(NOT Catch2_FOUND AND FASTAMP_BUILD_TESTS STREQUAL "AUTO")
    set_property(
      CACHE FASTAMP_TESTS_LEFT_OUT
      PROPERTY VALUE "Catch2 is not installed, and CATCH2_INCLUDE names no folder that has it"
    )
  elseif(NOT Catch2_FOUND)
    message(
      FATAL_ERROR
      "fastamp: the C++ tests need Catch2: install it (Debian: apt-get install catch2), "
      "set CATCH2_INCLUDE to a folder with catch2/catch.hpp, or set "
      "FASTAMP_BUILD_TESTS=OFF"
    )
  endif()
endif()

# Their warnings, sanitizers and optimisation. The same for all, since they share precompiled headers.
function(_fastamp_set_test_options target)
  set_target_properties(${target} PROPERTIES CXX_STANDARD 20)
  fastamp_enable_warnings(${target})
  fastamp_enable_sanitizers(${target})
  # Release's -O3 would double the time to compile; what is under test is in the library.
  target_compile_options(${target} PRIVATE "$<$<CONFIG:Release>:-O1>")
  # False alarms of gcc 12 in std::string's operator+, which it shows where <string> is precompiled.
  target_compile_options(
    ${target}
    PRIVATE
      "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-array-bounds;-Wno-restrict;-Wno-stringop-overflow>"
  )
endfunction()

# Catch2 itself, main() and what tests of all folders use, compiled once; with the headers that cost
# a test most of its time to compile. v3 of Catch2 brings its code as a library, v2 as a header.
function(_fastamp_add_test_support)
  if(TARGET fastamp_test_support)
    return()
  endif()
  set(support "${PROJECT_SOURCE_DIR}/tests/cpp/support")
  add_library(
    fastamp_test_support
    STATIC
    "${support}/autocast_state.cpp"
    "${support}/casts.cpp"
    "${support}/main.cpp"
  )
  # With Catch2's own code in it, which is to be compiled here and not in each test.
  set_source_files_properties("${support}/main.cpp" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  target_precompile_headers(
    fastamp_test_support
    PRIVATE "${support}/catch.h" <torch/optim/adamw.h> <torch/optim/sgd.h>
  )
  _fastamp_set_test_options(fastamp_test_support)
  target_include_directories(fastamp_test_support PUBLIC "${support}/..")
  target_link_libraries(fastamp_test_support PUBLIC fastamp::fastamp)
  if(CATCH2_INCLUDE)
    target_include_directories(fastamp_test_support SYSTEM PUBLIC "${CATCH2_INCLUDE}")
  else()
    target_link_libraries(fastamp_test_support PUBLIC Catch2::Catch2)
  endif()
endfunction()

# Adds a program to a target that builds several, which is made when the first one comes.
function(_fastamp_add_to several target)
  if(NOT TARGET ${several})
    add_custom_target(${several})
  endif()
  add_dependencies(${several} ${target})
endfunction()

# Adds a program to what `make test` builds.
function(fastamp_test_of_product target)
  _fastamp_add_to(fastamp_product_tests ${target})
endfunction()

function(fastamp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "CUDA;WITHOUT_TORCH" "" "SOURCES;LABELS")
  _fastamp_add_test_support()
  set(target fastamp_test_${name})
  set(needs_cuda "${PROJECT_SOURCE_DIR}/tests/cpp/support/needs_cuda.cpp")
  add_executable(${target} ${arg_SOURCES} "${needs_cuda}")
  set_source_files_properties("${needs_cuda}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  if(NOT arg_WITHOUT_TORCH)
    target_precompile_headers(${target} REUSE_FROM fastamp_test_support)
  endif()
  target_compile_definitions(${target} PRIVATE FASTAMP_TEST_NEEDS_CUDA=$<BOOL:${arg_CUDA}>)
  # Tests of private parts include them as the library does, and link what is exported for them.
  target_include_directories(
    ${target}
    PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_BINARY_DIR}/src"
  )
  target_link_libraries(${target} PRIVATE fastamp_test_support)
  if(arg_CUDA)
    target_link_libraries(${target} PRIVATE fastamp_torch::cuda)
    list(APPEND arg_LABELS cuda)
    _fastamp_add_to(fastamp_gpu_tests ${target}) # what `make gpu` builds beside the package
  else()
    list(APPEND arg_LABELS cpu)
  endif()
  _fastamp_set_test_options(${target})
  fastamp_test_of_product(${target})
  add_test(NAME ${name} COMMAND ${target})
  # No TIMEOUT: `make test` gives one that fits the machine.
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" SKIP_RETURN_CODE 77)
endfunction()
