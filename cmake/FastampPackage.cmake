# What cpack makes: a Debian package and an archive of the library, its headers and what finds them.
# Both hold what is installed as component `fastamp`, nothing of Python.
set(CPACK_GENERATOR "DEB;TGZ")
set(CPACK_COMPONENTS_ALL fastamp)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_PACKAGE_NAME libfastamp-dev)
set(CPACK_PACKAGE_CONTACT "The fastamp developers <fastamp@users.noreply.github.com>")
set(CPACK_PACKAGE_VENDOR "fastamp")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FASTAMP_PACKAGE_NAME libfastamp-dev)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# Debian has no package of this torch: the library names its folder, and programs name theirs.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libstdc++6")
set(
  CPACK_DEBIAN_PACKAGE_DESCRIPTION
  "Automatic mixed precision for LibTorch
 Autocast regions, a gradient scaler and fused optimizers for C++ programs that
 use LibTorch ${FASTAMP_TORCH_VERSION}, which has to be on the machine."
)
include(CPack)
