# fastamp_add_module(<target> <Python's headers> <its SOABI> <source>...): fastamp._C for one Python.
# Target fastamp_modules builds those of all.
function(fastamp_add_module target include soabi)
  add_library(${target} MODULE ${ARGN})
  set_target_properties(
    ${target}
    PROPERTIES
      PREFIX ""
      OUTPUT_NAME _C
      SUFFIX ".${soabi}.so"
      CXX_STANDARD 20
      CXX_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
      UNITY_BUILD ${FASTAMP_UNITY_BUILD}
      UNITY_BUILD_BATCH_SIZE 10
  )
  target_include_directories(
    ${target}
    PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_BINARY_DIR}/src"
  )
  target_include_directories(${target} SYSTEM PRIVATE "${include}")
  target_compile_definitions(
    ${target}
    PRIVATE TORCH_API_INCLUDE_EXTENSION_H FASTAMP_FREE_THREADED=$<BOOL:${FASTAMP_FREE_THREADED}>
  )
  target_link_libraries(${target} PRIVATE fastamp::fastamp fastamp_torch::python)
  fastamp_enable_warnings(${target})
  fastamp_enable_sanitizers(${target})
  set_property(GLOBAL APPEND PROPERTY FASTAMP_MODULES ${target})
  add_dependencies(fastamp_modules ${target})
endfunction()
