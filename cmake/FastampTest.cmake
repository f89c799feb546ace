# fastamp_add_test(<name> SOURCES <file>... [LABELS <label>...] [CUDA])
#
# One Catch2 executable, fastamp_test_<name>, and one ctest entry. Not one entry per test case: each
# process loads libtorch. CUDA: the executable exits with 77 where there is no device, and ctest
# reports it as skipped. CATCH2_INCLUDE: folder with catch2/catch.hpp, where Catch2 is not installed.
include_guard(GLOBAL)
set(CATCH2_INCLUDE "" CACHE PATH "Folder that holds catch2/catch.hpp, if Catch2 is not installed")

# Catch2 itself and main(), compiled once. v3 brings its code as a library, v2 as a header.
function(_fastamp_add_test_main)
  if(TARGET fastamp_test_main)
    return()
  endif()
  if(NOT CATCH2_INCLUDE)
    find_package(Catch2 QUIET)
    if(NOT Catch2_FOUND)
      message(
        FATAL_ERROR
        "fastamp: the C++ tests need Catch2: install it (Debian: apt-get install catch2), "
        "set CATCH2_INCLUDE to a folder with catch2/catch.hpp, or set "
        "FASTAMP_BUILD_TESTS=OFF"
      )
    endif()
  endif()
  set(support "${PROJECT_SOURCE_DIR}/tests/cpp/support")
  add_library(fastamp_test_main STATIC "${support}/main.cpp")
  set_target_properties(fastamp_test_main PROPERTIES CXX_STANDARD 20)
  target_include_directories(fastamp_test_main PUBLIC "${support}/..")
  target_link_libraries(fastamp_test_main PUBLIC fastamp::fastamp)
  if(CATCH2_INCLUDE)
    target_include_directories(fastamp_test_main SYSTEM PUBLIC "${CATCH2_INCLUDE}")
  else()
    target_link_libraries(fastamp_test_main PUBLIC Catch2::Catch2)
  endif()
endfunction()

function(fastamp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "CUDA" "" "SOURCES;LABELS")
  _fastamp_add_test_main()
  set(target fastamp_test_${name})
  add_executable(${target} ${arg_SOURCES} "${PROJECT_SOURCE_DIR}/tests/cpp/support/needs_cuda.cpp")
  set_target_properties(${target} PROPERTIES CXX_STANDARD 20)
  target_compile_definitions(${target} PRIVATE FASTAMP_TEST_NEEDS_CUDA=$<BOOL:${arg_CUDA}>)
  # Tests of private parts include them as the library does, and link what is exported for them.
  target_include_directories(
    ${target}
    PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_BINARY_DIR}/src"
  )
  target_link_libraries(${target} PRIVATE fastamp_test_main)
  if(arg_CUDA)
    target_link_libraries(${target} PRIVATE fastamp_torch::cuda)
    list(APPEND arg_LABELS cuda)
  else()
    list(APPEND arg_LABELS cpu)
  endif()
  fastamp_enable_warnings(${target})
  fastamp_enable_sanitizers(${target})
  # Release's -O3 would double the time to compile; what is under test is in the library.
  target_compile_options(${target} PRIVATE "$<$<CONFIG:Release>:-O1>")
  add_test(NAME ${name} COMMAND ${target})
  # No TIMEOUT: `make test` gives one that fits the machine.
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" SKIP_RETURN_CODE 77)
endfunction()
