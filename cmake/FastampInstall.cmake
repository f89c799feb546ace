# Installs the library, its headers and a relocatable find_package(fastamp); and, for the Python
# package, the same into the package's folder beside _C and build_info.json.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_fastamp_config_dir share/cmake/fastamp)
install(
  TARGETS fastamp
  EXPORT fastampTargets
  COMPONENT fastamp
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
)
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
  configure_file("${PROJECT_SOURCE_DIR}/cmake/build_info.json.in" build_info.json @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/build_info.json" DESTINATION . COMPONENT python)
endif()

# A wheel may not name folders of the machine that built it: only the part of each RPATH that is
# relative is kept. At install time, so that one build folder serves wheels and editable installs.
function(_fastamp_relocatable target path component)
  get_target_property(rpath ${target} INSTALL_RPATH)
  list(JOIN rpath ":" rpath)
  string(REPLACE "$" "\\$" rpath "${rpath}")
  install(
    CODE
      "if(DEFINED ENV{FASTAMP_RELOCATABLE})
  set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${path}\")
  file(RPATH_SET FILE \"\${file}\" NEW_RPATH \"${rpath}\")
endif()"
    COMPONENT ${component}
  )
endfunction()

_fastamp_relocatable(fastamp "${CMAKE_INSTALL_LIBDIR}/libfastamp.so" fastamp)
if(FASTAMP_BUILD_PYTHON)
  _fastamp_relocatable(fastamp_python "$<TARGET_FILE_NAME:fastamp_python>" python)
endif()
