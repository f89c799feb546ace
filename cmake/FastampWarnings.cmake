# fastamp_enable_warnings(<target>): our own sources are compiled with these, users' never are.
include_guard(GLOBAL)

function(fastamp_enable_warnings target)
  set(
    cxx
    -Wall
    -Wextra
    -Wpedantic
    -Wshadow
    -Wconversion
    -Wsign-conversion
    -Wnon-virtual-dtor
    -Wold-style-cast
  )
  # c10::Half is made of __fp16 there, and of a float only through one.
  if(CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
    list(APPEND cxx -Wno-float-conversion)
  endif()
  # nvcc's generated host code breaks -Wpedantic, -Wconversion and -Wold-style-cast by itself.
  set(cuda -Wall -Wextra -Wshadow -Wnon-virtual-dtor)
  set(nvcc "")
  if(FASTAMP_WARNINGS_AS_ERRORS)
    list(APPEND cxx -Werror)
    list(APPEND cuda -Werror)
    set(nvcc -Werror=all-warnings)
  endif()
  list(JOIN cuda "," cuda)
  target_compile_options(
    ${target}
    PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:${cxx}>"
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${cuda};${nvcc}>"
  )
endfunction()
