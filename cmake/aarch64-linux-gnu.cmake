# Toolchain file: compiles for 64-bit Arm with Debian's cross compiler, and runs what CMake and ctest
# run by qemu.
#
# In: FASTAMP_AARCH64_ROOT  folder with the C library and the C++ runtime of an aarch64 system
#     CMAKE_PREFIX_PATH     torch for aarch64
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L "${FASTAMP_AARCH64_ROOT}")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES FASTAMP_AARCH64_ROOT)
# A cross linker does not follow the RPATHs of torch's libraries to those that they need.
set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,--allow-shlib-undefined")
