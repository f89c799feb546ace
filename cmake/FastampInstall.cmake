# Installs the library, its headers and a relocatable find_package(fastamp); and, for the Python
# package, the same into the package's folder beside _C and build_info.json.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# _fastamp_rpath(<target> <installed path> <component> <relative folder>...): where an installed
# library looks for those it needs. A wheel names only its neighbours in site-packages, because it
# is moved to other machines; every other install names torch's folders of this machine as well.
# Decided at install time, so that one build folder serves wheels and editable installs. (CMake's
# INSTALL_RPATH_USE_LINK_PATH would leave out a virtual environment inside the source folder.)
function(_fastamp_rpath target path component)
  list(TRANSFORM ARGN PREPEND "$ORIGIN/" OUTPUT_VARIABLE relative)
  list(TRANSFORM FASTAMP_WHEEL_CUDA_DIRS APPEND "/lib" OUTPUT_VARIABLE absolute)
  list(PREPEND absolute "${FASTAMP_TORCH_DIR}/lib")
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${relative};${absolute}")
  list(JOIN relative ":" relative)
  string(REPLACE "$" "\\$" relative "${relative}")
  install(
    CODE
      "if(DEFINED ENV{FASTAMP_RELOCATABLE})
  set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${path}\")
  file(RPATH_SET FILE \"\${file}\" NEW_RPATH \"${relative}\")
endif()"
    COMPONENT ${component}
  )
endfunction()

set(_fastamp_config_dir share/cmake/fastamp)
install(
  TARGETS fastamp
  EXPORT fastampTargets
  COMPONENT fastamp
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
)
set(_fastamp_neighbours ../../torch/lib)
if(FASTAMP_HAVE_CUDA)
  list(APPEND _fastamp_neighbours ../../nvidia/cu${_fastamp_cuda_major}/lib)
endif()
_fastamp_rpath(fastamp "${CMAKE_INSTALL_LIBDIR}/libfastamp.so" fastamp ${_fastamp_neighbours})
install(
  DIRECTORY "${PROJECT_SOURCE_DIR}/include/fastamp" "${PROJECT_BINARY_DIR}/include/fastamp"
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT fastamp
  FILES_MATCHING
  PATTERN "*.h"
)
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/fastampConfig.cmake.in"
  fastampConfig.cmake
  INSTALL_DESTINATION ${_fastamp_config_dir}
)
# LibTorch and fastamp 0.x both break their ABI between minors.
write_basic_package_version_file(fastampConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES
    "${PROJECT_BINARY_DIR}/fastampConfig.cmake"
    "${PROJECT_BINARY_DIR}/fastampConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/FastampTorch.cmake"
  DESTINATION ${_fastamp_config_dir}
  COMPONENT fastamp
)
install(
  EXPORT fastampTargets
  NAMESPACE fastamp::
  DESTINATION ${_fastamp_config_dir}
  COMPONENT fastamp
)

if(FASTAMP_BUILD_PYTHON)
  install(TARGETS fastamp_python LIBRARY DESTINATION . COMPONENT python)
  _fastamp_rpath(fastamp_python "$<TARGET_FILE_NAME:fastamp_python>" python lib ../torch/lib)
  configure_file("${PROJECT_SOURCE_DIR}/cmake/build_info.json.in" build_info.json @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/build_info.json" DESTINATION . COMPONENT python)
endif()
