# Installs the library, its headers and a relocatable find_package(fastamp); and, for the Python
# package, the same into the package's folder beside _C and build_info.json.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# _fastamp_rpath(<target> <installed path> <component> <relative folder>...): where an installed
# library looks for those it needs. A wheel names only its neighbours in site-packages, because it
# is moved to other machines; every other install names torch's folders of this machine as well.
# Decided at install time, so that one build folder serves wheels and editable installs: for wheels
# FASTAMP_RELOCATABLE in the environment is the way from the folder that is installed into to
# site-packages, which <site> stands for. (CMake's INSTALL_RPATH_USE_LINK_PATH would leave out a
# virtual environment inside the source folder.)
function(_fastamp_rpath target path component)
  list(TRANSFORM ARGN PREPEND "$ORIGIN/" OUTPUT_VARIABLE relative)
  list(TRANSFORM relative REPLACE "<site>" ".." OUTPUT_VARIABLE flat)
  list(TRANSFORM FASTAMP_WHEEL_CUDA_DIRS APPEND "/lib" OUTPUT_VARIABLE absolute)
  list(PREPEND absolute "${FASTAMP_TORCH_DIR}/lib")
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${flat};${absolute}")
  list(JOIN relative ":" relative)
  string(REPLACE "$" "\\$" relative "${relative}")
  install(
    CODE
      "if(DEFINED ENV{FASTAMP_RELOCATABLE})
  set(file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${path}\")
  string(REPLACE <site> \"\$ENV{FASTAMP_RELOCATABLE}\" rpath \"${relative}\")
  file(RPATH_SET FILE \"\${file}\" NEW_RPATH \"\${rpath}\")
endif()"
    COMPONENT ${component}
  )
endfunction()

set(_fastamp_config_dir share/cmake/fastamp)
install(
  TARGETS fastamp
  EXPORT fastampTargets
  COMPONENT fastamp
  LIBRARY
    DESTINATION ${CMAKE_INSTALL_LIBDIR}
    NAMELINK_SKIP # A wheel can hold no links, and neither CMake nor fastamp.pc needs this one.
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
)
_fastamp_rpath(
  fastamp
  "${CMAKE_INSTALL_LIBDIR}/libfastamp.so.${_fastamp_abi}"
  fastamp
  ../<site>/torch/lib
)
if(FASTAMP_HAVE_CUDA)
  install(
    TARGETS fastamp_cuda
    COMPONENT fastamp
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP
  )
  _fastamp_rpath(
    fastamp_cuda
    "${CMAKE_INSTALL_LIBDIR}/libfastamp_cuda.so.${_fastamp_abi}"
    fastamp
    ../<site>/torch/lib
    ../<site>/nvidia/cu${_fastamp_cuda_major}/lib
  )
endif()
install(
  DIRECTORY "${PROJECT_SOURCE_DIR}/include/fastamp" "${PROJECT_BINARY_DIR}/include/fastamp"
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT fastamp
  FILES_MATCHING
  PATTERN "*.h"
)
# For pkg-config. Like the library, it names torch's folder, or in a wheel the one beside it.
set(_fastamp_pc_torch "\${pcfiledir}/../../<site>/torch")
configure_file("${PROJECT_SOURCE_DIR}/cmake/fastamp.pc.in" relocatable/fastamp.pc @ONLY)
set(_fastamp_pc_torch "${FASTAMP_TORCH_DIR}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/fastamp.pc.in" fastamp.pc @ONLY)
install(
  CODE
    "set(from \"${PROJECT_BINARY_DIR}\")
if(DEFINED ENV{FASTAMP_RELOCATABLE})
  file(READ \"\${from}/relocatable/fastamp.pc\" text)
  string(REPLACE <site> \"\$ENV{FASTAMP_RELOCATABLE}\" text \"\${text}\")
  string(APPEND from \"/installed\")
  file(WRITE \"\${from}/fastamp.pc\" \"\${text}\")
endif()
file(
  INSTALL \"\${from}/fastamp.pc\"
  DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig\"
)"
  COMPONENT fastamp
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
  get_property(_fastamp_modules GLOBAL PROPERTY FASTAMP_MODULES)
  foreach(_fastamp_module IN LISTS _fastamp_modules)
    # Those of further Pythons are built for wheels alone.
    install(TARGETS ${_fastamp_module} LIBRARY DESTINATION . COMPONENT python OPTIONAL)
    set(_fastamp_file "$<TARGET_FILE_NAME:${_fastamp_module}>")
    _fastamp_rpath(${_fastamp_module} "${_fastamp_file}" python lib <site>/torch/lib)
  endforeach()
  configure_file("${PROJECT_SOURCE_DIR}/cmake/build_info.json.in" build_info.json @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/build_info.json" DESTINATION . COMPONENT python)
endif()
